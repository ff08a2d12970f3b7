// What every list operation on the CPU does: chunks to threads, and the chunks' results to tensors, in order.
#pragma once

#include <initializer_list>
#include <stdexcept>

#include "../api.h"
#include "../launch/threads.h"

namespace fp16opt {

// Below this, waking a thread takes longer than it saves (about 20 microseconds of work).
constexpr int64_t kSerialElements = 1 << 17;

inline int threads_for(const Table& table, int threads) { return table.elements < kSerialElements ? 1 : threads; }

// Written bytes from which on a pass stores around the cache: the step that it is part of moves some ten times as much,
// so that nothing of them would be left there for the next reader, and storing to lines that are not in the cache reads
// them first. A constant, because what systems tell of the cache may be of all cores of a socket together, and ranks on
// one machine share it in any case.
constexpr int64_t kStreamingThreshold = int64_t(8) << 20;
// A one-pass step writes little beside what it reads and writes in place, and gains nothing from it earlier.
constexpr int64_t kStepStreamingThreshold = int64_t(64) << 20;

template <class T>
T* at(const Pointers& pointers, const Table& table, size_t list, const Chunk& chunk) {
    const size_t place = size_t(chunk.tensor);
    return reinterpret_cast<T*>(static_cast<char*>(pointers[place]) +
                                chunk.start * item_size(table.dtypes[list][place]));
}

// The chunk whose memory is asked for while `chunk` is worked on: as far away as memory takes to come. Null behind the end.
inline const Chunk* later_chunk(const Table& table, const Chunk& chunk) {
    const int64_t far = 1 + 512 / (chunk.numel + 1);
    return &chunk - table.chunks.data() + far < int64_t(table.chunks.size()) ? &chunk + far : nullptr;
}

// Asks for the beginnings of a later chunk's memory. Of long tensors the loops and the processor itself see to that; short ones
// lie anywhere, and would be waited for one after the other.
FP16OPT_INLINE void prefetch_later(const Table& table, const Chunk& chunk, std::initializer_list<const Pointers*> lists) {
#if defined(__GNUC__)
    const Chunk* later = later_chunk(table, chunk);
    if (later == nullptr || later->numel > 1024) return;
    size_t k = 0;
    for (const Pointers* list : lists) {
        if (list == nullptr) continue;
        const char* from = at<const char>(*list, table, k, *later);
        int64_t bytes = later->numel * item_size(table.dtypes[k][size_t(later->tensor)]);
        if (bytes > 512) bytes = 512;  // more at once than a processor keeps track of would be waited for
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 1);
        ++k;
    }
#else
    (void)table, (void)chunk, (void)lists;
#endif
}

// Runs `compute` on every chunk and calls `take(place, result)` for each, in the order of the chunks.
template <class Result, class Compute, class Take>
void for_chunks(const Table& table, int threads, Compute&& compute, Take&& take) {
    const std::vector<Chunk>& chunks = table.chunks;
    std::vector<Result> results(chunks.size());
    parallel_for(int64_t(chunks.size()), threads_for(table, threads),
                 [&](int64_t i) { results[size_t(i)] = compute(chunks[size_t(i)]); });
    for (size_t i = 0; i < results.size(); ++i) take(size_t(chunks[i].tensor), results[i]);
}

inline void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(what);
}

}  // namespace fp16opt
