// The list operations on the CPU: chunks to threads, and the chunks' results to tensors, in order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "../functors/sample.h"
#include "lists.h"
#include "marking.h"

namespace fp16opt {
namespace {

double total_norm(const double* sumsq, int64_t n) {
    double total = 0.0;
    for (int64_t i = 0; i < n; ++i) total += sumsq[i];
    return std::sqrt(total);
}

void require_pointers(const Table& table, std::initializer_list<const Pointers*> lists) {
    require(table.dtypes.size() == lists.size(), "the table was made for another number of lists");
    for (const Pointers* list : lists) {
        require(list->size() == table.numels.size(), "the list does not have the table's length");
    }
}

void require_grads(const Table& table, const Pointers& grads, const Pointers& outs) {
    require_pointers(table, {&grads, &outs});
    for (int32_t place : table.places) {
        const bool wide = table.dtypes[1][size_t(place)] == DType::wide;
        require(wide == (table.dtypes[0][size_t(place)] == DType::wide) &&
                    (wide || table.dtypes[1][size_t(place)] == DType::single), "outs must be float32, or float64 for float64");
    }
}

void require_rows(const Table& table, int64_t n) {
    for (int32_t place : table.places) require(place < n, "a row lies outside the statistics");
}

}  // namespace

Table::Table(std::vector<int64_t> numels_, std::vector<std::vector<DType>> dtypes_, std::vector<int32_t> places_,
             const std::vector<Piece>& pieces)
    : numels(std::move(numels_)), dtypes(std::move(dtypes_)), places(std::move(places_)) {
    for (const auto& list : dtypes) {
        require(list.size() == numels.size(), "dtypes must have one entry for each tensor");
        for (DType dtype : list) require(dtype >= DType::half && dtype <= DType::byte, "unknown dtype code");
    }
    for (int32_t place : places) {
        require(place >= 0 && size_t(place) < numels.size(), "a place lies outside the lists");
        require(numels[size_t(place)] >= 0, "a size is negative");
        elements += numels[size_t(place)];
    }
    require(pieces.empty() || pieces.size() == numels.size(), "pieces must have one entry for each tensor");
    for (size_t i = 0; i < pieces.size(); ++i) {
        const Piece& piece = pieces[i];
        require(piece.offset >= 0 && piece.unit >= 0 && piece.stride >= 0, "a number of a piece is negative");
        require(piece.unit == 0 || numels[i] % piece.unit == 0, "a piece is no whole number of units");
    }
    chunks = pack(numels, places, pieces);
}

void unscale(const Table& table, const std::vector<Pointers>& lists, float inv_scale, const std::vector<uint8_t>& add,
             bool writes, const GradRows& rows, int threads) {
    require(!lists.empty() && lists.size() == table.dtypes.size(), "the table was made for another number of lists");
    const Pointers &grads = lists.front(), &outs = lists.back();
    require(grads.size() == table.numels.size(), "the list does not have the table's length");
    if (writes) require_grads(table, grads, outs);
    require_rows(table, rows.n);
    require(add.size() == table.numels.size(), "accumulate must have one entry for each tensor");
    require(writes || std::find(add.begin(), add.end(), 1) == add.end(), "what is not written can't be added to");
    for (int32_t place : table.places) {
        rows.nonfinite[size_t(place)] = 0;
        rows.sumsq[size_t(place)] = 0.0;
    }
    const CpuLevel& level = current_level();
    const bool stream = table.elements * 4 >= kStreamingThreshold;
    for_chunks<UnscaleResult>(
        table, threads,
        [&](const Chunk& c) {
            prefetch_later(table, c, {&grads, writes ? &outs : nullptr});
            return level.unscale(table.dtypes[0][size_t(c.tensor)], at<void>(grads, table, 0, c),
                                 writes ? at<void>(outs, table, 1, c) : nullptr, c.numel, inv_scale, add[size_t(c.tensor)] != 0, stream);
        },
        [&](size_t place, const UnscaleResult& result) {
            const size_t row = place;
            rows.nonfinite[row] |= int32_t(result.flags);
            rows.sumsq[row] += result.sumsq;
        });
    *rows.norm = total_norm(rows.sumsq, rows.n);
    bool found = false;
    for (int64_t i = 0; i < rows.n; ++i) found |= rows.nonfinite[i] != 0;
    *rows.found_inf = found ? 1.0f : 0.0f;
}

void unscale_clipped(const Table& table, const Pointers& grads, const Pointers& outs, float inv_scale, float factor,
                     int threads) {
    require_grads(table, grads, outs);
    const CpuLevel& level = current_level();
    const bool stream = table.elements * 4 >= kStreamingThreshold;
    parallel_for(int64_t(table.chunks.size()), threads_for(table, threads), [&](int64_t i) {
        const Chunk& c = table.chunks[size_t(i)];
        prefetch_later(table, c, {&grads, &outs});
        level.unscale_clipped(table.dtypes[0][size_t(c.tensor)], at<void>(grads, table, 0, c),
                              at<void>(outs, table, 1, c), c.numel, inv_scale, factor, stream);
    });
}

void l2norm(const Table& table, const Pointers& tensors, double* sumsq, int64_t n, double* norm, double* norms,
            int threads) {
    require_pointers(table, {&tensors});
    require_rows(table, n);
    for (int32_t place : table.places) sumsq[size_t(place)] = 0.0;
    const CpuLevel& level = current_level();
    for_chunks<double>(
        table, threads,
        [&](const Chunk& c) {
            return level.sum_of_squares(table.dtypes[0][size_t(c.tensor)], at<void>(tensors, table, 0, c), c.numel);
        },
        [&](size_t place, double sum) { sumsq[place] += sum; });
    *norm = total_norm(sumsq, n);
    for (int64_t i = 0; i < n; ++i) norms[i] = std::sqrt(sumsq[i]);
}

void scale(const Table& table, const Pointers& tensors, float factor, int threads) {
    require_pointers(table, {&tensors});
    const CpuLevel& level = current_level();
    parallel_for(int64_t(table.chunks.size()), threads_for(table, threads), [&](int64_t i) {
        const Chunk& c = table.chunks[size_t(i)];
        level.scale(table.dtypes[0][size_t(c.tensor)], at<void>(tensors, table, 0, c), c.numel, factor);
    });
}

void lerp(const Table& table, const Pointers& averages, const Pointers& values, double part, bool from_average,
          int threads) {
    require_pointers(table, {&averages, &values});
    for (int32_t place : table.places) {
        const DType average = table.dtypes[0][size_t(place)], value = table.dtypes[1][size_t(place)];
        require(average == (value == DType::wide ? DType::wide : DType::single), "averages must be float32, or float64 of float64");
    }
    const CpuLevel& level = current_level();
    parallel_for(int64_t(table.chunks.size()), threads_for(table, threads), [&](int64_t i) {
        const Chunk& c = table.chunks[size_t(i)];
        prefetch_later(table, c, {&averages, &values});
        level.lerp(table.dtypes[1][size_t(c.tensor)], at<void>(averages, table, 0, c), at<void>(values, table, 1, c), c.numel,
                   part, from_average);
    });
}

bool axpby(const Table& table, float a, const Pointers& xs, float b, const Pointers& ys, const Pointers& outs,
           uint32_t check, int threads) {
    require_pointers(table, {&xs, &ys, &outs});
    for (const auto& list : table.dtypes) {
        for (int32_t place : table.places) require(list[size_t(place)] != DType::wide, "axpby does not take float64");
    }
    const CpuLevel& level = current_level();
    bool bad = false;
    for_chunks<char>(
        table, threads,
        [&](const Chunk& c) {
            const size_t place = size_t(c.tensor);
            const DType dtypes[3] = {table.dtypes[0][place], table.dtypes[1][place], table.dtypes[2][place]};
            return char(level.axpby(dtypes, a, at<void>(xs, table, 0, c), b, at<void>(ys, table, 1, c),
                                    at<void>(outs, table, 2, c), c.numel, check));
        },
        [&](size_t, char found) { bad |= found != 0; });
    return bad;
}

void cast(const Table& table, const Pointers& masters, const Pointers& params, int32_t* overflow, const Marks& marks,
          int threads) {
    require_pointers(table, {&masters, &params});
    for (int32_t place : table.places) {
        require(table.dtypes[0][size_t(place)] == DType::single && item_size(table.dtypes[1][size_t(place)]) == 2,
                "masters must be float32 and params 16 bits wide");
        overflow[size_t(place)] = 0;
    }
    const CpuLevel& level = current_level();
    const bool stream = table.elements * 2 >= kStreamingThreshold && marks.memory == nullptr;
    const auto round = [&](const Chunk& c) {
        return level.cast(table.dtypes[1][size_t(c.tensor)], at<float>(masters, table, 0, c),
                          at<void>(params, table, 1, c), c.numel, stream);
    };
    for_chunks<uint32_t>(
        table, threads,
        [&](const Chunk& c) {
            prefetch_later(table, c, {&masters, &params});
            return marks.memory == nullptr ? round(c) : round_and_mark(table, params, marks, c, round);
        },
        [&](size_t place, uint32_t flags) { overflow[place] |= int32_t(flags); });
}

namespace {

constexpr int64_t kSerialWords = 1 << 17;  // as kSerialElements; a word takes a fraction of a nanosecond

// How many elements of a lattice are asked for ahead. Each lies in a page of its own or shares it with one other. A look at 48
// tensors of a million elements takes two thirds of the time that it takes without.
constexpr int64_t kLatticeAhead = 24;

// A chunk's part of the digest. Nothing depends on what was loaded before, so that the misses of a lattice overlap.
uint64_t sampled(const CpuLevel& level, const char* values, const Chunk& c, int64_t stride) {
    uint64_t sum = 0;
    if (stride == 0) {
        const int64_t whole = c.numel / 4, left = c.numel % 4;
        sum = level.sample_words(values, whole);
        if (left == 0) return sum;
        uint64_t word = 0;
        std::memcpy(&word, values + 8 * whole, size_t(2 * left));
        return sum + sample_term(word, whole);
    }
    for (int64_t i = (c.start + stride - 1) / stride * stride; i < c.start + c.numel; i += stride) {
#if defined(__GNUC__)
        __builtin_prefetch(values + 2 * (i + kLatticeAhead * stride));
#endif
        uint16_t bits;
        std::memcpy(&bits, values + 2 * i, sizeof(bits));
        sum += sample_term(bits, i);
    }
    return sum;
}

}  // namespace

void sample(const Table& table, const Pointers& tensors, int64_t* samples, int threads) {
    require_pointers(table, {&tensors});
    int64_t cost = 0;  // in words from consecutive memory; another element of a lattice is a cache miss
    std::vector<int64_t> strides(table.numels.size());  // 0: looked at whole
    for (int32_t place : table.places) {
        require(item_size(table.dtypes[0][size_t(place)]) == 2, "a sample is of 16-bit tensors");
        samples[size_t(place)] = 0;
        const int64_t numel = table.numels[size_t(place)];
        if (numel > kSampledWhole) strides[size_t(place)] = sample_stride(numel);
        cost += numel <= kSampledWhole ? numel / 4 : 32 * (numel / kLeastStride);
    }
    const CpuLevel& level = current_level();
    for_chunks<uint64_t>(
        table, cost < kSerialWords ? 1 : threads,
        [&](const Chunk& c) {
            prefetch_later(table, c, {&tensors});
            return sampled(level, static_cast<const char*>(tensors[size_t(c.tensor)]), c, strides[size_t(c.tensor)]);
        },
        [&](size_t place, uint64_t part) {  // unsigned: signed numbers may not overflow
            int64_t& row = samples[place];
            row = int64_t(uint64_t(row) + part);
        });
}

}  // namespace fp16opt
