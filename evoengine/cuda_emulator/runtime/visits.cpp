// The number of visits of each warp to each site in the first round of launches, from which the gate computes the
// coverage of its cases. Lanes arrive one by one; the count of a warp is that of its lane with the most visits.
#include "internal.h"

#include <cstdlib>
#include <cstring>

namespace evo_emu {

namespace {

struct Site {
    uint64_t number;
    Visit kind;
    uint32_t counts[warp_size], came_true;
};

struct Sites {
    Site* of;
    unsigned count, capacity, last;
};

// VISIT in devices/base.py
struct __attribute__((packed)) Record {
    uint64_t block;
    uint32_t warp;
    uint8_t kind;
    uint64_t site, count, came_true;
};

bool counting;
Sites warps[max_fibers / warp_size];
Record* records;
uint64_t record_count, record_capacity;

template <class T, class Number>
void make_room(T*& of, Number count, Number& capacity) {
    if (count < capacity) return;
    capacity = capacity ? 2 * capacity : 16;
    of = static_cast<T*>(realloc(of, capacity * sizeof(T)));
    if (!of) crash("the emulator has no memory left for its count of visits");
}

Site& find(Sites& sites, Visit kind, uint64_t number) {
    auto is_it = [&](const Site& s) { return s.number == number && s.kind == kind; };
    if (sites.last < sites.count && is_it(sites.of[sites.last])) return sites.of[sites.last];
    for (unsigned i = 0; i < sites.count; ++i)
        if (is_it(sites.of[i])) return sites.of[sites.last = i];
    make_room(sites.of, sites.count, sites.capacity);
    sites.last = sites.count++;
    return sites.of[sites.last] = Site{number, kind, {}, 0};
}

}  // namespace

void count_visits(bool wanted) { counting = wanted; }

void visit(Visit kind, uint64_t number, bool came_true, unsigned count) {
    if (!counting) return;
    Site& site = find(warps[current / warp_size], kind, number);
    const unsigned lane = rank_of(current) % warp_size;
    site.counts[lane] += count;
    site.came_true += came_true && lane == 0;
}

// The resident block has ended.
void end_visits(unsigned block) {
    for (unsigned warp = 0; warp * warp_size < launch.threads; ++warp) {
        Sites& sites = warps[first_fiber(block) / warp_size + warp];
        for (unsigned i = 0; i < sites.count; ++i) {
            const Site& s = sites.of[i];
            uint64_t most = 0;
            for (uint32_t count : s.counts) most = count > most ? count : most;
            make_room(records, record_count, record_capacity);
            records[record_count++] = {number_of_block(block), warp, uint8_t(s.kind), s.number, most, s.came_true};
        }
        sites.count = 0;
    }
}

void write_visits() {
    write_all(&record_count, sizeof record_count);
    write_all(records, record_count * sizeof *records);
}

}  // namespace evo_emu
