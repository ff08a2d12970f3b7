// Where in the memory of a CudaTable its parts are.
#pragma once

#include "../cuda_api.h"
#include "cuda.cuh"

namespace fp16opt {

struct Layout {
    int64_t pointers, add, chunks, table, counters, partial, end;

    Layout(int lists, int64_t entries, int64_t chunk_count) {
        pointers = 0;
        add = behind(pointers, lists * entries, sizeof(void*));
        chunks = behind(add, entries, 1);
        table = behind(chunks, chunk_count, sizeof(Chunk));
        counters = behind(table, entries + 1, sizeof(Entry));
        partial = behind(counters, entries + 1, sizeof(uint32_t));
        end = behind(partial, chunk_count, sizeof(Found));
    }

    static int64_t behind(int64_t start, int64_t count, size_t size) {
        return (start + count * int64_t(size) + 15) / 16 * 16;
    }
};

// The table as kernels see it.
inline Lists lists_of(const CudaTable& table, void* memory) {
    const Layout at(table.lists(), table.entries(), table.chunk_count());
    char* base = static_cast<char*>(memory);
    return Lists{reinterpret_cast<void* const*>(base + at.pointers),
                 reinterpret_cast<const uint8_t*>(base + at.add),
                 reinterpret_cast<const Chunk*>(base + at.chunks),
                 reinterpret_cast<const Entry*>(base + at.table),
                 reinterpret_cast<Found*>(base + at.partial),
                 reinterpret_cast<uint32_t*>(base + at.counters),
                 table.chunk_count(),
                 table.entries(),
                 table.filled()};
}

}  // namespace fp16opt
