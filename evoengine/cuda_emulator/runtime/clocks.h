// Vector clocks: the events that each thread of a kernel knows to have happened (clocks.cpp).
#pragma once
#include "internal.h"

namespace evo_emu {

// A counted reference. The runtime does not use the C++ library.
template <class T>
class Ref {
    T* object = nullptr;

public:
    Ref() = default;
    explicit Ref(T* fresh) : object(fresh) {}
    Ref(const Ref& o) : object(o.object) {
        if (object) ++object->references;
    }
    Ref(Ref&& o) : object(o.object) { o.object = nullptr; }
    Ref& operator=(Ref o) {
        T* own = object;
        object = o.object;
        o.object = own;
        return *this;
    }
    ~Ref() {
        if (object && !--object->references) T::destroy(object);
    }
    T* operator->() const { return object; }
    T* get() const { return object; }
    explicit operator bool() const { return object; }
    bool operator==(const Ref& o) const { return object == o.object; }
};

// One clock for each thread of a block.
struct BlockClocks {
    unsigned references;
    uint32_t of[];

    static BlockClocks* make();
    static void destroy(BlockClocks* clocks);
};

// Of blocks by rising number.
struct OtherBlocks {
    struct Entry {
        uint32_t block;  // its number in the grid, plus one
        Ref<BlockClocks> clocks;
    };
    unsigned references, count;

    Entry* entries() { return reinterpret_cast<Entry*>(this + 1); }  // which lie behind it
    static OtherBlocks* make(unsigned most);
    static void destroy(OtherBlocks* blocks);
};

// The knowledge about threads of one's own block, and of other blocks.
struct Known {
    Ref<BlockClocks> own;
    Ref<OtherBlocks> others;
};

// All knowledge that passes between threads where they meet: what is known, what a fence has made visible to each
// scope, and what was read from others and awaits a fence.
struct Passed {
    uint32_t owner;  // the block in whose terms it is: its number in the grid, plus one; 0: nothing was passed
    Known known, fenced[3], read[3];
};

struct When {
    uint32_t block;  // its number in the grid, plus one; 0: never
    uint16_t thread;
    uint32_t clock;
};
When now(unsigned fiber);
bool is_known(const When& when, unsigned fiber);
bool knows_block(uint32_t block, unsigned fiber);  // by its number in the grid, plus one: anything that it did

// For one place in memory: what those who wrote its contents have released.
struct Released {
    Known by_all;  // to threads of any block
    struct Own {
        uint32_t block;  // its number in the grid, plus one
        Scope scope;
        Known known;
    }* own;
    unsigned count, capacity;
};
void clear(Released& released);
void release_to(Released& place, unsigned fiber, Scope scope, bool by_itself);
void acquire_from(const Released& place, unsigned fiber, Scope scope, bool at_once);
void fence_clocks(unsigned fiber, Scope scope);
bool has_fenced(unsigned fiber, Scope scope);

}  // namespace evo_emu
