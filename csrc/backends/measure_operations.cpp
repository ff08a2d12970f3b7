// The numbers of reports over lists of tensors on the CPU.
#include "../api_measures.h"

#include "lists.h"
#include "measure_level.h"

namespace fp16opt {
namespace {

void require_lists(const Table& table, std::initializer_list<const Pointers*> lists, int64_t n) {
    require(table.dtypes.size() == lists.size(), "the table was made for another number of lists");
    for (const Pointers* list : lists) {
        require(list->size() == table.numels.size(), "a list does not have the table's length");
    }
    for (int32_t place : table.places) {
        require(place < n, "a row lies outside the numbers");
        for (const auto& list : table.dtypes) {
            require(list[size_t(place)] <= DType::single, "numbers are of float16, bfloat16 and float32");
        }
    }
}

// Results of chunks in order, each row from zero; the largest magnitude becomes a number again.
template <class Compute>
void fill(const Table& table, int count, int largest, double* numbers, int threads, Compute&& compute) {
    for (int32_t place : table.places) {
        double* row = numbers + size_t(place) * count;
        for (int k = 0; k < count; ++k) row[k] = 0.0;
    }
    for_chunks<Numbers>(table, threads, compute, [&](size_t place, const Numbers& found) {
        double* row = numbers + place * count;
        for (int k = 0; k < count; ++k) row[k] = joined(k == largest, row[k], found.v[k]);
    });
    if (largest < 0) return;
    for (int32_t place : table.places) {
        double& bits = numbers[size_t(place) * count + largest];
        bits = double(bit_cast<float>(uint32_t(bits)));
    }
}

}  // namespace

void measure(const Table& table, const Pointers& grads, double* numbers, int64_t n, int threads) {
    require_lists(table, {&grads}, n);
    const MeasureLevel* level = current_level().measures;
    fill(table, kMeasured, kLargest, numbers, threads, [&](const Chunk& c) {
        prefetch_later(table, c, {&grads});
        return level->measure(table.dtypes[0][size_t(c.tensor)], at<void>(grads, table, 0, c), c.numel);
    });
}

void compare(const Table& table, const Pointers& masters, const Pointers& weights, const float* before,
             const int64_t* offsets, double* numbers, int64_t n, int threads) {
    require_lists(table, {&masters, &weights}, n);
    const MeasureLevel* level = current_level().measures;
    fill(table, kCompared, -1, numbers, threads, [&](const Chunk& c) {
        const size_t place = size_t(c.tensor);
        prefetch_later(table, c, {&masters, &weights});
        return level->compare(table.dtypes[0][place], table.dtypes[1][place], at<void>(masters, table, 0, c),
                              at<void>(weights, table, 1, c), before + offsets[place],
                              table.numels[place] <= kMeasuredWhole, c.start, c.numel);
    });
}

}  // namespace fp16opt
