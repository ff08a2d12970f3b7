// Gradients in codes of 8 bits, over lists of tensors on the CPU.
#include "../api_held.h"

#include "../functors/held.h"
#include "held_level.h"
#include "lists.h"

namespace fp16opt {
namespace {

static_assert(kChunk % kHeldBlock == 0, "chunks begin where blocks do");

void require_held(const Table& table, std::initializer_list<const Pointers*> lists, size_t coded) {
    require(table.dtypes.size() == 2, "the table was made for another number of lists");
    for (const Pointers* list : lists) {
        require(list->size() == table.numels.size(), "a list does not have the table's length");
    }
    for (size_t list = 0; list < table.dtypes.size(); ++list) {
        for (int32_t place : table.places) {
            const DType dtype = table.dtypes[list][size_t(place)];
            require(list == coded ? dtype == DType::byte : item_size(dtype) == 2 || dtype == DType::single,
                    "codes must have 8 bits, gradients 16 or 32");
        }
    }
}

// Calls work(chunk, scales) for every chunk.
template <class Work>
void for_held(const Table& table, const Pointers& scales, int threads, Work&& work) {
    parallel_for(int64_t(table.chunks.size()), threads_for(table, threads), [&](int64_t i) {
        const Chunk& c = table.chunks[size_t(i)];
        work(c, static_cast<float*>(scales[size_t(c.tensor)]) + c.start / kHeldBlock);
    });
}

}  // namespace

void encode(const Table& table, const Pointers& grads, const Pointers& codes, const Pointers& scales, int threads) {
    require_held(table, {&grads, &codes, &scales}, 1);
    const HeldLevel* level = current_level().held;
    for_held(table, scales, threads, [&](const Chunk& c, float* of_chunk) {
        level->encode(table.dtypes[0][size_t(c.tensor)], at<const void>(grads, table, 0, c), at<void>(codes, table, 1, c),
                      of_chunk, uint32_t(c.start), c.numel);
    });
}

void decode(const Table& table, const Pointers& codes, const Pointers& outs, const Pointers& scales, int threads) {
    require_held(table, {&codes, &outs, &scales}, 0);
    const HeldLevel* level = current_level().held;
    for_held(table, scales, threads, [&](const Chunk& c, const float* of_chunk) {
        level->decode(table.dtypes[1][size_t(c.tensor)], at<const void>(codes, table, 0, c), of_chunk,
                      at<void>(outs, table, 1, c), c.numel);
    });
}

}  // namespace fp16opt
