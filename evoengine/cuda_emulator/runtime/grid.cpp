// The order in which clusters of the grid run. One after the other in a drawn order if blocks cannot communicate;
// otherwise a drawn number of them concurrently, and one more if all running ones wait.
#include "internal.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace evo_emu {

namespace {

constexpr uint64_t max_blocks = 1 << 24;
constexpr unsigned threads_to_begin_with = 1536;  // side by side, unless more are needed

uint64_t clusters, begun;
unsigned running, most_running;

unsigned cluster_fibers() { return kernel.cluster * block_stride; }

unsigned draw_running() {
    if (!checked) return 1;
    const unsigned drawn = 2u << random_below(4), room = std::max(threads_to_begin_with / cluster_fibers(), 2u);
    return std::min({drawn, room, max_fibers / cluster_fibers()});
}

void end_cluster(unsigned first_block) {
    check_nothing_in_flight(first_block);
    check_all_canaries(first_block);
    for (unsigned i = first_block; i < first_block + kernel.cluster; ++i) end_visits(i);
    --running;
}

unsigned free_block() {
    for (unsigned block = 0; block < resident; block += kernel.cluster) {
        bool all = true;
        for (unsigned i = block; i < block + kernel.cluster; ++i) all &= has_ended(i);
        if (all) return block;
    }
    return resident;
}

// Programs may build on blocks that begin in their order: one waits only for those before it. So the blocks of a grid
// that does not fit as a whole are shuffled among as many as do.
void shuffle(uint32_t* order) {
    const uint64_t room = std::max<uint64_t>(max_fibers / cluster_fibers(), 1);
    for (uint64_t first = 0; first < clusters; first += room)
        for (uint64_t i = std::min(room, clusters - first); i > 1; --i)
            std::swap(order[first + i - 1], order[first + random_below(i)]);
}

}  // namespace

// Whether another cluster can be started if all running ones wait for others.
bool more_clusters_fit() { return checked && begun < clusters && (running + 1) * cluster_fibers() <= max_fibers; }

void run_grid() {
    const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    if (!blocks || blocks > max_blocks) crash("a grid of %lu blocks: the emulator runs 1 to %lu", blocks, max_blocks);
    clusters = blocks / kernel.cluster;
    auto* order = static_cast<uint32_t*>(malloc(clusters * sizeof(uint32_t)));
    if (!order) crash("the emulator has no memory for the order of the blocks");
    for (uint32_t i = 0; i < clusters; ++i) order[i] = i;
    shuffle(order);
    most_running = draw_running();
    running = 0;
    for (begun = 0; begun < clusters || running;) {
        for (; running < most_running && begun < clusters; ++running)
            begin_cluster(free_block(), uint64_t(order[begun++]) * kernel.cluster);
        run_fibers();
        const unsigned ended = cluster_that_ended();
        ended < max_resident ? end_cluster(ended) : void(++most_running);
    }
    free(order);
}

// The cluster whose first block has that number, by itself.
void run_blocks_from(uint64_t number) {
    clusters = begun = running = 1;
    begin_cluster(0, number);
    run_fibers();
    end_cluster(cluster_that_ended());
}

}  // namespace evo_emu
