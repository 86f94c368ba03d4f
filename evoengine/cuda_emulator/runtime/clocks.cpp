// Vector clocks (Lamport; Mattern, "Virtual time and global states of distributed systems") with PTX's scopes: which
// accesses each thread knows to have happened. A thread's clock goes on where it tells others of what it did. Clocks of
// a block's threads are kept together and shared by all who know the same, as all its threads do behind a barrier.
//
// What a fence has made visible passes on at barriers as what is known does: behind the fences of all threads and a
// barrier, one thread may raise the counter for all of them. The memory model of PTX words that otherwise (a barrier,
// then the one thread's fence); CUDA's own samples rely on both.
#include "clocks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace evo_emu {

BlockClocks* BlockClocks::make() {
    const size_t bytes = sizeof(BlockClocks) + launch.threads * sizeof(uint32_t);
    auto* made = static_cast<BlockClocks*>(calloc(1, bytes));
    if (!made) crash("the emulator has no memory left for the clocks of blocks");
    made->references = 1;
    return made;
}

void BlockClocks::destroy(BlockClocks* clocks) { free(clocks); }

OtherBlocks* OtherBlocks::make(unsigned most) {
    auto* made = static_cast<OtherBlocks*>(calloc(1, sizeof(OtherBlocks) + most * sizeof(Entry)));
    if (!made) crash("the emulator has no memory left for the clocks of blocks");
    made->references = 1;
    return made;
}

void OtherBlocks::destroy(OtherBlocks* blocks) {
    for (unsigned i = 0; i < blocks->count; ++i) blocks->entries()[i].~Entry();
    free(blocks);
}

namespace {

struct Agent {
    uint32_t block, clock;
    Passed self;
};

Agent* agents;

void join(Ref<BlockClocks>& into, const Ref<BlockClocks>& more) {
    if (!more || into == more) return;
    if (!into) return void(into = more);
    bool behind = false, ahead = false;
    for (unsigned i = 0; i < launch.threads; ++i) {
        behind |= into->of[i] < more->of[i];
        ahead |= into->of[i] > more->of[i];
    }
    if (!behind) return;
    if (!ahead) return void(into = more);
    Ref<BlockClocks> joined(BlockClocks::make());
    for (unsigned i = 0; i < launch.threads; ++i) joined->of[i] = std::max(into->of[i], more->of[i]);
    into = joined;
}

void raise(Ref<BlockClocks>& clocks, unsigned thread, uint32_t clock) {
    if (clocks && clocks->of[thread] >= clock) return;
    if (!clocks || clocks->references > 1) {
        Ref<BlockClocks> own(BlockClocks::make());
        if (clocks) memcpy(own->of, clocks->of, launch.threads * sizeof(uint32_t));
        clocks = own;
    }
    clocks->of[thread] = clock;
}

bool holds_all(const Ref<OtherBlocks>& in, const Ref<OtherBlocks>& all) {
    const OtherBlocks::Entry *held = in->entries(), *end = held + in->count;
    for (unsigned j = 0; j < all->count; ++j) {
        const OtherBlocks::Entry& wanted = all->entries()[j];
        while (held < end && held->block < wanted.block) ++held;
        if (held == end || held->block != wanted.block || !(held->clocks == wanted.clocks)) return false;
    }
    return true;
}

void join(Ref<OtherBlocks>& into, const Ref<OtherBlocks>& more) {
    if (!more || into == more) return;
    if (!into || holds_all(more, into)) return void(into = more);
    if (holds_all(into, more)) return;
    Ref<OtherBlocks> joined(OtherBlocks::make(into->count + more->count));
    unsigned i = 0, j = 0;
    while (i < into->count || j < more->count) {
        OtherBlocks::Entry& next = joined->entries()[joined->count++];
        const bool left = j == more->count || (i < into->count && into->entries()[i].block <= more->entries()[j].block);
        const bool both = left && j < more->count && into->entries()[i].block == more->entries()[j].block;
        next = left ? into->entries()[i++] : more->entries()[j];
        if (both) join(next.clocks, more->entries()[j].clocks);
        if (!left || both) ++j;
    }
    into = joined;
}

Ref<OtherBlocks> alone(uint32_t block, const Ref<BlockClocks>& clocks) {
    Ref<OtherBlocks> made(OtherBlocks::make(1));
    made->count = 1;
    made->entries()[0] = {block, clocks};
    return made;
}

const OtherBlocks::Entry* find(const Ref<OtherBlocks>& blocks, uint32_t block) {
    if (!blocks) return nullptr;
    const OtherBlocks::Entry *first = blocks->entries(), *end = first + blocks->count;
    const auto* found = std::lower_bound(first, end, block, [](const auto& e, uint32_t b) { return e.block < b; });
    return found < end && found->block == block ? found : nullptr;
}

// The knowledge of threads of `from_block`, for threads of `into_block`; 0 stands for any block.
void join(Known& into, uint32_t into_block, const Known& from, uint32_t from_block) {
    if (from_block == into_block) {
        join(into.own, from.own);
    } else {
        if (from.own) join(into.others, alone(from_block, from.own));
        if (const auto* own = find(from.others, into_block)) join(into.own, own->clocks);
    }
    join(into.others, from.others);
}

void join(Passed& into, uint32_t into_block, const Passed& from, uint32_t from_block) {
    join(into.known, into_block, from.known, from_block);
    for (unsigned i = 0; i < 3; ++i) {
        join(into.fenced[i], into_block, from.fenced[i], from_block);
        join(into.read[i], into_block, from.read[i], from_block);
    }
}

Known all_known(unsigned fiber) {
    const Agent& a = agents[fiber];
    Known all = a.self.known;
    raise(all.own, rank_of(fiber), a.clock);
    return all;
}

bool is_empty(const Known& known) { return !known.own && !known.others; }

uint32_t cluster_of(uint32_t block) { return (block - 1) / kernel.cluster; }

}  // namespace

void begin_clocks(unsigned first_block) {
    if (!agents) agents = static_cast<Agent*>(map_zeroed(max_fibers * sizeof(Agent), "clocks"));
    for (unsigned block = first_block; block < first_block + kernel.cluster; ++block)
        for (unsigned i = first_fiber(block); i < end_of_block(block); ++i)
            agents[i] = {uint32_t(number_of_block(block) + 1), 1, {}};
}

When now(unsigned fiber) { return {agents[fiber].block, uint16_t(rank_of(fiber)), agents[fiber].clock}; }

bool is_known(const When& when, unsigned fiber) {
    const Agent& a = agents[fiber];
    const BlockClocks* clocks = a.self.known.own.get();
    if (when.block != a.block) {
        const auto* other = find(a.self.known.others, when.block);
        clocks = other ? other->clocks.get() : nullptr;
    } else if (when.thread == rank_of(fiber)) {
        return true;
    }
    return clocks && clocks->of[when.thread] >= when.clock;
}

bool knows_block(uint32_t block, unsigned fiber) { return find(agents[fiber].self.known.others, block); }

// The thread passes on all that it knows to those who depart from there later. It is expressed relative to the block
// whose thread came first, its `owner`.
void arrive(unsigned fiber, Passed*& at) {
    Agent& a = agents[fiber];
    if (!at) at = new (calloc(1, sizeof(Passed))) Passed();
    if (!at->owner) at->owner = a.block;
    join(*at, at->owner, a.self, a.block);
    Known self;
    raise(at->owner == a.block ? at->known.own : self.own, rank_of(fiber), a.clock);
    if (at->owner != a.block) join(at->known, at->owner, self, a.block);
    ++a.clock;
}

// All threads of the block meet and share their knowledge. Only a thread itself knows of its later clock.
void meet(unsigned block) {
    const unsigned first = first_fiber(block), end = end_of_block(block);
    Passed all{agents[first].block, {Ref<BlockClocks>(BlockClocks::make()), {}}, {}, {}};
    for (unsigned i = first; i < end; ++i) {
        const Passed& self = agents[i].self;
        all.known.own->of[i - first] = agents[i].clock++;
        join(all.known.others, self.known.others);
        for (unsigned scope = 0; scope < 3; ++scope) {
            join(all.fenced[scope], 0, self.fenced[scope], 0);
            join(all.read[scope], 0, self.read[scope], 0);
        }
    }
    for (unsigned i = first; i < end; ++i) agents[i].self = all;
}

void depart(unsigned fiber, const Passed* from) {
    if (from && from->owner) join(agents[fiber].self, agents[fiber].block, *from, from->owner);
}

void copy(Passed*& to, const Passed* from) {
    if (!from) return;
    if (!to) to = new (calloc(1, sizeof(Passed))) Passed();
    *to = *from;
}

void clear(Passed* passed) {
    if (passed) *passed = {};
}

void clear(Released& released) {
    released.by_all = {};
    for (unsigned i = 0; i < released.count; ++i) released.own[i].~Own();
    released.count = 0;
}

namespace {

void add(Released& place, const Known& known, uint32_t block, Scope scope) {
    if (scope == Scope::device) join(place.by_all, 0, known, block);
    for (unsigned i = 0; i < place.count; ++i)
        if (place.own[i].block == block && place.own[i].scope == scope)
            return join(place.own[i].known, block, known, block);
    if (place.count == place.capacity) {
        place.capacity = place.capacity ? 2 * place.capacity : 4;
        place.own = static_cast<Released::Own*>(realloc((void*)place.own, place.capacity * sizeof(Released::Own)));
        if (!place.own) crash("the emulator has no memory left for the clocks of blocks");
    }
    new (&place.own[place.count++]) Released::Own{block, scope, known};
}

}  // namespace

// The thread writes there, for others of the scope to read: it releases what it has fenced before or, if the access
// itself releases, all that it knows.
void release_to(Released& place, unsigned fiber, Scope scope, bool by_itself) {
    Agent& a = agents[fiber];
    if (by_itself) {
        add(place, all_known(fiber), a.block, scope);
        ++a.clock;
        return;
    }
    for (unsigned i = unsigned(scope); i-- > 0;) {
        const Known& fenced = a.self.fenced[i];
        const bool as_wider = i + 1 < unsigned(scope) && fenced.own == a.self.fenced[i + 1].own;
        if (!is_empty(fenced) && !as_wider) add(place, fenced, a.block, Scope(i + 1));
    }
}

// The thread reads what was written there: it acquires what was released at once, or at its next fence.
void acquire_from(const Released& place, unsigned fiber, Scope scope, bool at_once) {
    Agent& a = agents[fiber];
    auto learn = [&](const Known& known, uint32_t from, Scope needed) {
        join(at_once ? a.self.known : a.self.read[unsigned(needed) - 1], a.block, known, from);
    };
    if (scope == Scope::device) learn(place.by_all, 0, Scope::device);
    for (unsigned i = 0; i < place.count; ++i) {
        const Released::Own& own = place.own[i];
        if (own.block == a.block) learn(own.known, own.block, Scope::block);
        else if (cluster_of(own.block) == cluster_of(a.block) && scope >= Scope::cluster && own.scope >= Scope::cluster)
            learn(own.known, own.block, Scope::cluster);
    }
}

void fence_clocks(unsigned fiber, Scope scope) {
    Agent& a = agents[fiber];
    for (unsigned i = 0; i < unsigned(scope); ++i) {
        join(a.self.known, a.block, a.self.read[i], a.block);
        a.self.read[i] = {};
    }
    const Known all = all_known(fiber);
    for (unsigned i = 0; i < unsigned(scope); ++i) a.self.fenced[i] = all;
    ++a.clock;
}

// Whether a strong write would release anything.
bool has_fenced(unsigned fiber, Scope scope) { return !is_empty(agents[fiber].self.fenced[unsigned(scope) - 1]); }

}  // namespace evo_emu
