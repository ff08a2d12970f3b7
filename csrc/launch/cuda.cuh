// How 256 threads work on a chunk, and chunks become tensors. Every program is a sequence of phases: a GPU runs a phase on
// all threads of a block at once, with a barrier behind it; compiled as plain C++ the same source runs it on one thread
// after the other, so that programs can be tested, bit for bit, on a machine without a GPU.
#pragma once

#include "../functors/elementary.h"
#include "chunk.h"
#include "eight.h"

FP16OPT_BEGIN

constexpr int kThreads = kLanes;         // of a block: thread t owns lane t
constexpr int kRow = kThreads * kGroup;  // elements that a block passes over at a time

// Reads what other blocks wrote: past the first-level cache, which does not see their writes.
template <class T>
FP16OPT_HD T read_fresh(const T* at) {
#if defined(__CUDA_ARCH__)
    return __ldcg(at);
#else
    return *at;
#endif
}

template <class Phase>
FP16OPT_HD void for_threads(Phase&& phase) {
#if defined(__CUDA_ARCH__)
    phase(int(threadIdx.x));
    __syncthreads();
#else
    turns.run(phase);
#endif
}

// Tells the compiler what it can't see of an address that comes out of a table.
template <class T>
FP16OPT_HD T* in_global_memory(T* at) {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(at));
#endif
    return at;
}

// What a chunk, or a tensor, was found to hold.
struct Found {
    double sumsq;
    uint64_t digest;
    uint32_t flags;
};

struct Entry {  // one tensor
    int64_t row;          // of its statistics
    int64_t first_chunk;  // the next entry's first is one behind its last
    int64_t stride;       // of the lattice in its sample; 0: it is looked at whole
    int8_t dtypes[8];     // by list
};

// Lists of tensors in device memory. `pointers` and `add` change from call to call, the others do not.
struct Lists {
    void* const* pointers;  // [list * entries + entry]
    const uint8_t* add;     // [entry]
    const Chunk* chunks;
    const Entry* table;  // entries + 1
    uint32_t* counters;  // entries + 1, all 0 between launches
    Found* partial;      // [chunk]
    int64_t chunk_count;
    int32_t entries;
    int32_t filled;  // entries that have elements

    // Where the chunk begins in a list.
    template <class T>
    FP16OPT_HD T* at(int list, const Chunk& chunk) const {
        return in_global_memory(static_cast<T*>(pointers[int64_t(list) * entries + chunk.tensor])) + chunk.start;
    }
    FP16OPT_HD char* bytes_at(int list, const Chunk& chunk) const {
        char* first = static_cast<char*>(pointers[int64_t(list) * entries + chunk.tensor]);
        return in_global_memory(first) + chunk.start * item_size(dtype(list, chunk));
    }
    FP16OPT_HD DType dtype(int list, const Chunk& chunk) const { return DType(table[chunk.tensor].dtypes[list]); }
};

// Calls load(i, raw, left) and use(i, raw, left) for each of a thread's groups, of which the chunk's i-th element is the
// first: there are `left` from it on, or more where all threads of the warp have a whole group. These stay together. The
// loads of `kAhead` rows are in flight together, if `aligned` says that no stores need the longer code for other addresses.
template <class Raw, int kAhead, class Load, class Use>
FP16OPT_HD void for_groups(int n, int thread, bool aligned, Load&& load, Use&& use) {
    int i = thread * kGroup;
    const int behind = (kWarp - thread % kWarp) * kGroup;  // to the end of the warp's groups
    for (; aligned && i + (kAhead - 1) * kRow + behind <= n; i += kAhead * kRow) {
        Raw raw[kAhead];
        FP16OPT_UNROLL
        for (int k = 0; k < kAhead; ++k) load(i + k * kRow, raw[k], kWarp * kGroup);
        FP16OPT_UNROLL
        for (int k = 0; k < kAhead; ++k) use(i + k * kRow, raw[k], kWarp * kGroup);
    }
    for (; i < n; i += kRow) {
        Raw raw;
        load(i, raw, n - i);
        use(i, raw, n - i);
    }
}

// The memory that the threads of a block share.
struct Shared {
    double sums[kThreads];
    uint64_t digests[kThreads];
    uint32_t flags[kThreads];
    Found total;
    bool tensor_done, all_done;
};

// Counts a block in. True for the last of `expected` ones, which finds the counter at 0 again, and sees what all the
// others wrote before they came here. It decides who adds up, never in which order.
FP16OPT_HD bool is_last(uint32_t* counter, uint32_t expected) {
#if defined(__CUDA_ARCH__)
    __threadfence();
    const bool last = atomicAdd(counter, 1u) + 1 == expected;
    __threadfence();
#else
    const bool last = ++*counter == expected;
#endif
    if (last) *counter = 0;
    return last;
}

// Which parts of Found an operation fills.
enum Finds : int { kSumsq = 1, kDigest = 2, kFlags = 4 };

// The fixed tree over the lanes; all of it ends up in entry 0.
template <int finds>
FP16OPT_HD void reduce(Shared& s) {
    FP16OPT_UNROLL
    for (int width = kThreads / 2; width > 0; width /= 2) {
        for_threads([&](int t) {
            if (t >= width) return;
            if (finds & kSumsq) s.sums[t] += s.sums[t + width];
            if (finds & kDigest) s.digests[t] += s.digests[t + width];
            if (finds & kFlags) s.flags[t] |= s.flags[t + width];
        });
    }
}

template <int finds>
FP16OPT_HD void put_thread(Shared& s, int t, const Found& found) {
    if (finds & kSumsq) s.sums[t] = found.sumsq;
    if (finds & kDigest) s.digests[t] = found.digest;
    if (finds & kFlags) s.flags[t] = found.flags;
}

template <int finds>
FP16OPT_HD void add_thread(Shared& s, int t, const Found& found) {
    if (finds & kSumsq) s.sums[t] += found.sumsq;
    if (finds & kDigest) s.digests[t] += found.digest;
    if (finds & kFlags) s.flags[t] |= found.flags;
}

// What all lanes together were found to hold.
template <int finds>
FP16OPT_HD Found get_all(const Shared& s) {
    return {finds & kSumsq ? s.sums[0] : 0.0, finds & kDigest ? s.digests[0] : 0u, finds & kFlags ? s.flags[0] : 0u};
}

// Writes what `finds` says, and nothing else.
template <int finds>
FP16OPT_HD void put_part(Found& part, const Found& found) {
    if (finds & kSumsq) part.sumsq = found.sumsq;
    if (finds & kDigest) part.digest = found.digest;
    if (finds & kFlags) part.flags = found.flags;
}

// Adds the chunks of one tensor, in order, to s.total.
template <int finds>
FP16OPT_HD void add_chunks(const Lists& lists, int64_t first, int64_t end, Shared& s) {
    Found total{0.0, 0, 0};  // of thread 0, in registers: in shared memory every addition would wait for a store before it
    for (int64_t base = first; base < end; base += kThreads) {
        const int count = end - base < kThreads ? int(end - base) : kThreads;
        for_threads([&](int t) {
            if (t >= count) return;
            const Found* part = lists.partial + base + t;
            if (finds & kSumsq) s.sums[t] = read_fresh(&part->sumsq);
            if (finds & kDigest) s.digests[t] = read_fresh(&part->digest);
            if (finds & kFlags) s.flags[t] = read_fresh(&part->flags);
        });
        for_threads([&](int t) {
            if (t != 0) return;
            for (int k = 0; k < count; ++k) {
                if (finds & kSumsq) total.sumsq += s.sums[k];
                if (finds & kDigest) total.digest += s.digests[k];
                if (finds & kFlags) total.flags |= s.flags[k];
            }
        });
    }
    for_threads([&](int t) {
        if (t == 0) s.total = total;
    });
}

// All threads of a block at a chunk. Operations whose threads need each other's results have more phases than this one.
template <class Operation>
FP16OPT_HD void work_on(const Operation& operation, const Lists& lists, const Chunk& chunk, Shared& s) {
    for_threads([&](int t) { put_thread<Operation::finds>(s, t, operation.work(lists, chunk, t)); });
}

// A block's part of an operation that reports something for each tensor. `Operation` has:
//   finds                                    parts of Found
//   Found work(lists, chunk, thread)         one thread's part of a chunk
//   void report(entry, found)                one thread: a tensor is complete
//   void finish(shared)                      all threads of the very last block: all tensors are
template <class Operation>
FP16OPT_HD void run_finding(const Operation& operation, const Lists& lists, int64_t block, Shared& s) {
    constexpr int finds = Operation::finds;
    if (block < lists.chunk_count) {
        const Chunk chunk = lists.chunks[block];
        work_on(operation, lists, chunk, s);
        reduce<finds>(s);
        // Read after the work, in which they would take registers.
        const int64_t first = lists.table[chunk.tensor].first_chunk, end = lists.table[chunk.tensor + 1].first_chunk;
        for_threads([&](int t) {
            if (t != 0) return;
            s.total = get_all<finds>(s);
            s.tensor_done = true;
            if (end - first == 1) return;
            put_part<finds>(lists.partial[block], s.total);
            s.tensor_done = is_last(lists.counters + chunk.tensor, uint32_t(end - first));
        });
        if (!s.tensor_done) return;
        if (end - first > 1) add_chunks<finds>(lists, first, end, s);
        for_threads([&](int t) {
            if (t != 0) return;
            operation.report(lists.table[chunk.tensor], s.total);
            s.all_done = is_last(lists.counters + lists.entries, uint32_t(lists.filled));
        });
        if (!s.all_done) return;
    }
    for_threads([&](int t) {
        FP16OPT_ROLLED
        for (int32_t i = t; i < lists.entries; i += kThreads) {
            if (lists.table[i].first_chunk == lists.table[i + 1].first_chunk) {
                operation.report(lists.table[i], Found{0.0, 0, 0});
            }
        }
    });
    operation.finish(s);
}

// The sum of n numbers, one by one from the first, and whether any flag is set; in s.total.
FP16OPT_HD void total_of_rows(const double* sumsq, const int32_t* flags, int64_t n, Shared& s) {
    Found total{0.0, 0, 0};  // as in add_chunks
    for (int64_t base = 0; base < n; base += kThreads) {
        const int count = n - base < kThreads ? int(n - base) : kThreads;
        for_threads([&](int t) {
            if (t >= count) return;
            s.sums[t] = read_fresh(sumsq + base + t);
            s.flags[t] = flags == nullptr ? 0u : uint32_t(read_fresh(flags + base + t));
        });
        for_threads([&](int t) {
            if (t != 0) return;
            for (int k = 0; k < count; ++k) {
                total.sumsq += s.sums[k];
                total.flags |= s.flags[k];
            }
        });
    }
    for_threads([&](int t) {
        if (t == 0) s.total = total;
    });
}

// A block's part of an operation that reports nothing: `Operation` has work(lists, chunk, thread), and is_needed(), the
// same for all blocks.
template <class Operation>
FP16OPT_HD void run_mapping(const Operation& operation, const Lists& lists, int64_t block, int64_t blocks) {
    if (!operation.is_needed()) return;
    for (; block < lists.chunk_count; block += blocks) {
        const Chunk chunk = lists.chunks[block];
        for_threads([&](int t) { operation.work(lists, chunk, t); });
    }
}

FP16OPT_END
