// Split masters over lists of tensors on the CPU.
#include "../api_split.h"

#include "lists.h"
#include "marking.h"
#include "split_level.h"

namespace fp16opt {
namespace {

void require_split(const Table& table, std::initializer_list<const Pointers*> lists, size_t single) {
    require(table.dtypes.size() == lists.size(), "the table was made for another number of lists");
    for (const Pointers* list : lists) {
        require(list->size() == table.numels.size(), "a list does not have the table's length");
    }
    for (size_t list = 0; list < table.dtypes.size(); ++list) {
        for (int32_t place : table.places) {
            const DType dtype = table.dtypes[list][size_t(place)];
            require(list == single ? dtype == DType::single : item_size(dtype) == 2,
                    "masters must be float32, weights and remainders 16 bits wide");
        }
    }
}

}  // namespace

void split(const Table& table, const Pointers& masters, const Pointers& models, const Pointers& remainders,
           int32_t* overflow, const Marks& marks, int threads) {
    require_split(table, {&masters, &models, &remainders}, 0);
    for (int32_t place : table.places) overflow[size_t(place)] = 0;
    const SplitLevel* level = current_level().splits;
    const auto round = [&](const Chunk& c) {
        return level->split(table.dtypes[1][size_t(c.tensor)], at<float>(masters, table, 0, c),
                            at<void>(models, table, 1, c), at<void>(remainders, table, 2, c), c.numel);
    };
    for_chunks<uint32_t>(
        table, threads,
        [&](const Chunk& c) {
            return marks.memory == nullptr ? round(c) : round_and_mark(table, models, marks, c, round);
        },
        [&](size_t place, uint32_t flags) { overflow[place] |= int32_t(flags); });
}

void join(const Table& table, const Pointers& models, const Pointers& remainders, const Pointers& outs, int threads) {
    require_split(table, {&models, &remainders, &outs}, 2);
    const SplitLevel* level = current_level().splits;
    parallel_for(int64_t(table.chunks.size()), threads_for(table, threads), [&](int64_t i) {
        const Chunk& c = table.chunks[size_t(i)];
        level->join(table.dtypes[0][size_t(c.tensor)], at<void>(models, table, 0, c), at<void>(remainders, table, 1, c),
                    at<float>(outs, table, 2, c), c.numel);
    });
}

}  // namespace fp16opt
