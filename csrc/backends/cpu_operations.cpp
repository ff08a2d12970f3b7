// The list operations on the CPU: chunks to threads, and the chunks' results to tensors, in order.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "lists.h"

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
    for (int32_t place : table.places) require(table.rows[size_t(place)] < n, "a row lies outside the statistics");
}

void add_hashes(const Watched& watched, size_t row, const HashResult& found) {
    add_hash(watched.hashes[row], found.hash);
    if (watched.samples != nullptr) add_hash(watched.samples[row], found.sample);
}

void hash_chunks(const Watched& watched, const std::vector<Chunk>& chunks, int threads) {
    const CpuLevel& level = current_level();
    const Table& table = watched.table;
    for_chunks<HashResult>(
        table, chunks, threads,
        [&](const Chunk& c) { return level.hash(at<void>(watched.params, table, 0, c), c.numel, c.start / 4); },
        [&](size_t place, const HashResult& found) { add_hashes(watched, size_t(table.rows[place]), found); });
}

void clear_hashes(const Table& table, int64_t* hashes) {
    for (int32_t place : table.places) {
        require(item_size(table.dtypes[0][size_t(place)]) == 2, "a hash is of 16-bit tensors");
        hashes[table.rows[size_t(place)]] = 0;
    }
}

// The 16-bit tensors that an operation's chunks pass by. Tensors that no tensor of `table` with as many elements shares
// its row with are hashed here and now.
class Along {
public:
    Along(const Table& table, const Watched* watched, int threads) : table_(table), watched_(watched) {
        if (watched == nullptr) return;
        const Table& of = watched->table;
        require_pointers(of, {&watched->params});
        clear_hashes(of, watched->hashes);
        clear_hashes(of, watched->samples);
        int64_t rows = 0;
        for (int32_t place : table.places) rows = std::max(rows, table.rows[size_t(place)] + 1);
        std::vector<int32_t> place_of_row(size_t(rows), -1), others;
        for (int32_t place : table.places) place_of_row[size_t(table.rows[size_t(place)])] = place;
        params_.resize(table.numels.size(), nullptr);
        for (int32_t from : of.places) {
            const int64_t row = of.rows[size_t(from)];
            const int32_t place = row < rows ? place_of_row[size_t(row)] : -1;
            if (place < 0 || of.numels[size_t(from)] != table.numels[size_t(place)]) {
                others.push_back(from);
            } else {
                params_[size_t(place)] = static_cast<const char*>(watched->params[size_t(from)]);
            }
        }
        hash_chunks(*watched, pack(of.numels, others), threads);
    }
    const void* at(const Chunk& c) const {
        const char* param = params_.empty() ? nullptr : params_[size_t(c.tensor)];
        return param == nullptr ? nullptr : param + 2 * c.start;
    }
    void take(size_t place, const HashResult& found) const {
        if (!params_.empty() && params_[place] != nullptr) add_hashes(*watched_, size_t(table_.rows[place]), found);
    }

private:
    const Table& table_;
    const Watched* watched_;
    std::vector<const char*> params_;  // by place of the table
};

}  // namespace

Table::Table(std::vector<int64_t> numels_, std::vector<int64_t> rows_, std::vector<std::vector<DType>> dtypes_,
             std::vector<int32_t> places_)
    : numels(std::move(numels_)), rows(std::move(rows_)), dtypes(std::move(dtypes_)), places(std::move(places_)) {
    require(rows.size() == numels.size(), "rows must have one entry for each tensor");
    for (const auto& list : dtypes) {
        require(list.size() == numels.size(), "dtypes must have one entry for each tensor");
        for (DType dtype : list) require(dtype >= DType::half && dtype <= DType::wide, "unknown dtype code");
    }
    for (int32_t place : places) {
        require(place >= 0 && size_t(place) < numels.size(), "a place lies outside the lists");
        require(numels[size_t(place)] >= 0 && rows[size_t(place)] >= 0, "a size or row is negative");
        elements += numels[size_t(place)];
    }
    chunks = pack(numels, places);
}

void unscale(const Table& table, const Pointers& grads, const Pointers& outs, float inv_scale,
             const std::vector<uint8_t>& add, bool writes, const GradRows& rows, const Watched* watched, int threads) {
    require_pointers(table, {&grads, &outs});
    if (writes) require_grads(table, grads, outs);
    require_rows(table, rows.n);
    const Along along(table, watched, threads);
    require(add.size() == table.numels.size(), "accumulate must have one entry for each tensor");
    require(writes || std::find(add.begin(), add.end(), 1) == add.end(), "what is not written can't be added to");
    for (int32_t place : table.places) {
        rows.nonfinite[table.rows[size_t(place)]] = 0;
        rows.sumsq[table.rows[size_t(place)]] = 0.0;
    }
    const CpuLevel& level = current_level();
    const bool stream = table.elements * 4 >= kStreamingThreshold;
    for_chunks<UnscaleResult>(
        table, threads,
        [&](const Chunk& c) {
            return level.unscale(table.dtypes[0][size_t(c.tensor)], at<void>(grads, table, 0, c),
                                 writes ? at<void>(outs, table, 1, c) : nullptr, c.numel, inv_scale, add[size_t(c.tensor)] != 0, stream,
                                 along.at(c), c.start / 4);
        },
        [&](size_t place, const UnscaleResult& result) {
            const size_t row = size_t(table.rows[place]);
            along.take(place, result.watched);
            rows.nonfinite[row] |= int32_t(result.flags);
            rows.sumsq[row] += result.sumsq;
        });
    *rows.norm = total_norm(rows.sumsq, rows.n);
    bool found = false;
    for (int64_t i = 0; i < rows.n; ++i) found |= rows.nonfinite[i] != 0;
    *rows.found_inf = found ? 1.0f : 0.0f;
}

void unscale_clipped(const Table& table, const Pointers& grads, const Pointers& outs, float inv_scale, float factor,
                     const Watched* watched, int threads) {
    require_grads(table, grads, outs);
    const CpuLevel& level = current_level();
    const bool stream = table.elements * 4 >= kStreamingThreshold;
    const Along along(table, watched, threads);
    for_chunks<HashResult>(
        table, threads,
        [&](const Chunk& c) {
            return level.unscale_clipped(table.dtypes[0][size_t(c.tensor)], at<void>(grads, table, 0, c),
                                         at<void>(outs, table, 1, c), c.numel, inv_scale, factor, stream, along.at(c),
                                         c.start / 4);
        },
        [&](size_t place, const HashResult& found) { along.take(place, found); });
}

void l2norm(const Table& table, const Pointers& tensors, double* sumsq, int64_t n, double* norm, double* norms,
            int threads) {
    require_pointers(table, {&tensors});
    require_rows(table, n);
    for (int32_t place : table.places) sumsq[table.rows[size_t(place)]] = 0.0;
    const CpuLevel& level = current_level();
    for_chunks<double>(
        table, threads,
        [&](const Chunk& c) {
            return level.sum_of_squares(table.dtypes[0][size_t(c.tensor)], at<void>(tensors, table, 0, c), c.numel);
        },
        [&](size_t place, double sum) { sumsq[table.rows[place]] += sum; });
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

void cast(const Table& table, const Pointers& masters, const Pointers& params, int32_t* overflow, int64_t* hashes,
          int threads) {
    require_pointers(table, {&masters, &params});
    for (int32_t place : table.places) {
        require(table.dtypes[0][size_t(place)] == DType::single && item_size(table.dtypes[1][size_t(place)]) == 2,
                "masters must be float32 and params 16 bits wide");
        overflow[table.rows[size_t(place)]] = 0;
        hashes[table.rows[size_t(place)]] = 0;
    }
    const CpuLevel& level = current_level();
    const bool stream = table.elements * 2 >= kStreamingThreshold;
    for_chunks<CastResult>(
        table, threads,
        [&](const Chunk& c) {
            return level.cast(table.dtypes[1][size_t(c.tensor)], at<float>(masters, table, 0, c),
                              at<void>(params, table, 1, c), c.numel, c.start / 4, stream);
        },
        [&](size_t place, const CastResult& result) {
            overflow[table.rows[place]] |= int32_t(result.flags);
            add_hash(hashes[table.rows[place]], result.hash);
        });
}

void content_hash(const Table& table, const Pointers& tensors, int64_t* hashes, int threads) {
    require_pointers(table, {&tensors});
    clear_hashes(table, hashes);
    hash_chunks({table, tensors, hashes, nullptr}, table.chunks, threads);
}

void content_sample(const Table& table, const Pointers& tensors, int64_t* samples, int threads) {
    require_pointers(table, {&tensors});
    clear_hashes(table, samples);
    const CpuLevel& level = current_level();
    for_chunks<uint64_t>(
        table, threads,
        [&](const Chunk& c) { return level.sample(at<void>(tensors, table, 0, c), c.numel, c.start / 4); },
        [&](size_t place, uint64_t part) { add_hash(samples[table.rows[place]], part); });
}

}  // namespace fp16opt
