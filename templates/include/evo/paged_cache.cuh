// ---- paged_cache: where the keys of a sequence lie: in pages of PAGE slots, which its row of a block table lists ----
// PAGE 0: there is no table, and the sequence's slots follow one another. A cache has fewer than 2^31 slots. Entries of
// the table behind the page of the last key may be anything: ask for no slot of a key that does not exist.
template <int PAGE>
struct PagedCache {
    const int* pages;  // the sequence's row of the table
    int first;         // without pages: the sequence's first slot

    __device__ __forceinline__ int slot(int key) const {
        if constexpr (PAGE > 0) return pages[key / PAGE] * PAGE + key % PAGE;
        else return first + key;
    }
};
