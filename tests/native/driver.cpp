// Runs every list operation over random lists, at every SIMD level that the machine has and several thread counts, for the
// sanitizers to watch. It also compares the levels with each other: the first level's results are the expected ones. Every
// tensor is a heap block of exactly its size, so that a read or write past an end is seen. No Python, no torch.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/api.h"
#include "../../csrc/api_changes.h"
#include "../../csrc/api_measures.h"
#include "../../csrc/api_split.h"
#include "../../csrc/api_steps.h"
#include "formulas.h"
#include "../../csrc/launch/threads.h"

using namespace fp16opt;

namespace {

using Bytes = std::vector<std::vector<unsigned char>>;

std::mt19937_64 random_bits(20240101);

int64_t below(int64_t n) { return int64_t(random_bits() % uint64_t(n)); }

// Sizes at and beside the borders of groups, blocks, rows of lanes and chunks, and empty ones.
int64_t random_numel() {
    static const int64_t borders[] = {0, 1, 8, 64, 128, 2048, 65536, 131072};
    const int64_t numel = borders[below(8)] + below(3) - 1;
    return numel < 0 ? 0 : numel;
}

// Random bit patterns: all kinds of numbers, infinities and nans among them; or, for most tensors, without the highest
// bit of the exponent, so that all are below 2 and sums can be compared.
std::vector<unsigned char> random_block(int64_t numel, int64_t item) {
    std::vector<unsigned char> block(static_cast<size_t>(numel * item));
    for (auto& byte : block) byte = static_cast<unsigned char>(random_bits());
    if (below(4) != 0) {
        for (size_t top = size_t(item) - 1; top < block.size(); top += size_t(item)) block[top] &= 0xbf;
    }
    return block;
}

// How a tensor lies in a whole one: as one piece, or in units, of which there are at most 64. Most begin within a word of bits.
Piece random_piece(int64_t numel) {
    Piece piece{below(1000), 0, 0};
    for (int64_t count = 2 + below(8); count <= 64 && piece.unit == 0; ++count) {
        if (numel > 0 && numel % count == 0) piece.unit = numel / count;
    }
    piece.stride = piece.unit + below(100);
    return piece;
}

struct Lists {
    std::vector<int64_t> numels;
    std::vector<int32_t> places;
    std::vector<std::vector<DType>> dtypes;
    std::vector<Bytes> memory;
    std::vector<Piece> pieces;

    // `choose` gives the dtypes of one row of tensors.
    template <class Choose>
    Lists(int count, int lists, Choose choose) : dtypes(size_t(lists)), memory(size_t(lists)) {
        for (int i = 0; i < count; ++i) {
            numels.push_back(random_numel());
            if (below(8) != 0) places.push_back(i);
            pieces.push_back(below(2) != 0 ? random_piece(numels.back()) : Piece{0, 0, 0});
            const std::vector<DType> row = choose();
            for (size_t k = 0; k < size_t(lists); ++k) {
                dtypes[k].push_back(row[k]);
                memory[k].push_back(random_block(numels.back(), item_size(row[k])));
            }
        }
    }

    Table table() const { return Table(numels, dtypes, places); }
    Table table_of_pieces() const { return Table(numels, dtypes, places, pieces); }

    Pointers pointers(size_t list) {
        Pointers found;
        for (auto& block : memory[list]) found.push_back(block.data());
        return found;
    }
};

// Room for the bits of tensors, exactly as large as it has to be.
struct Marked {
    std::vector<uint64_t> memory;
    std::vector<int64_t> offsets;

    explicit Marked(const std::vector<int64_t>& numels) {
        int64_t size = 0;
        for (int64_t numel : numels) {
            offsets.push_back(size);
            size += 1 + (numel + 63) / 64;
        }
        memory.resize(size_t(size));
    }
    Marks marks() { return {memory.data(), offsets.data()}; }
};

DType any(int kinds) { return static_cast<DType>(below(kinds)); }

struct Results {
    std::vector<unsigned char> bytes;

    template <class T>
    void take(const std::vector<T>& values) {
        const auto* from = reinterpret_cast<const unsigned char*>(values.data());
        bytes.insert(bytes.end(), from, from + values.size() * sizeof(T));
    }
    void take(const Bytes& blocks) {
        for (const auto& block : blocks) take(block);
    }
    // Sums that are nan have no bits to compare.
    void take_sums(std::vector<double> sums) {
        for (double& sum : sums) sum = sum == sum ? sum : -1.0;
        take(sums);
    }
};

// Nans have no bits to compare: arithmetic at another SIMD level makes others.
bool is_nan(DType dtype, const unsigned char* at) {
    uint64_t bits = 0;
    std::memcpy(&bits, at, size_t(item_size(dtype)));
    switch (dtype) {
        case DType::half: return (bits & 0x7fffu) > 0x7c00u;
        case DType::bfloat16: return (bits & 0x7fffu) > 0x7f80u;
        case DType::single: return (bits & 0x7fffffffu) > 0x7f800000u;
        case DType::wide: return (bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
        case DType::byte: break;
    }
    return false;
}

bool has_nan(DType dtype, const std::vector<unsigned char>& block) {
    for (size_t at = 0; at < block.size(); at += size_t(item_size(dtype))) {
        if (is_nan(dtype, &block[at])) return true;
    }
    return false;
}

// `has_remainders`: what is not float32 are remainders, of which every bit counts.
void take_numbers(const Lists& lists, size_t list, Results& results, bool has_remainders = false) {
    for (size_t i = 0; i < lists.numels.size(); ++i) {
        std::vector<unsigned char> block = lists.memory[list][i];
        DType dtype = lists.dtypes[list][i];
        if (has_remainders && dtype != DType::single) dtype = DType::byte;
        const size_t item = size_t(item_size(dtype));
        for (size_t at = 0; at < block.size(); at += item) {
            if (is_nan(dtype, &block[at])) std::memset(&block[at], 0xff, item);
        }
        results.take(block);
    }
}

constexpr int kCount = 12;

// Looks at the gradients, writes them unscaled and clipped.
void run_clip(Lists lists, int threads, Results& results) {
    std::vector<int32_t> nonfinite(kCount, 0);
    std::vector<double> sumsq(kCount, 0.0), norm(1, 0.0);
    std::vector<float> found(1, 0.0f);
    const GradRows rows{nonfinite.data(), sumsq.data(), kCount, norm.data(), found.data()};
    const std::vector<uint8_t> add(kCount, 0);
    const Bytes before = lists.memory[1];
    unscale(lists.table(), {lists.pointers(0), lists.pointers(1)}, 0.25f, add, false, rows, threads);
    if (lists.memory[1] != before) throw std::runtime_error("a pass that only looks has written");
    unscale_clipped(lists.table(), lists.pointers(0), lists.pointers(1), 0.25f, 0.7f, threads);
    results.take(nonfinite);
    results.take_sums(sumsq);
    results.take_sums(norm);
    take_numbers(lists, 1, results);
}

void run_unscale(Lists lists, const std::vector<uint8_t>& add, int threads, Results& results) {
    std::vector<int32_t> nonfinite(kCount, 0);
    std::vector<double> sumsq(kCount, 0.0), norm(1, 0.0);
    std::vector<float> found(1, 0.0f);
    const GradRows rows{nonfinite.data(), sumsq.data(), kCount, norm.data(), found.data()};
    unscale(lists.table(), {lists.pointers(0), lists.pointers(1)}, 0.25f, add, true, rows, threads);
    results.take(nonfinite);
    results.take_sums(sumsq);
    results.take_sums(norm);
    results.take(found);
    take_numbers(lists, 1, results);
}

// Averages are outs of gradients: float32, or float64 of float64.
void run_lerp(const Lists& lists, int threads, Results& results) {
    for (bool from_average : {false, true}) {
        Lists own = lists;
        const Table table(own.numels, {own.dtypes[1], own.dtypes[0]}, own.places);
        lerp(table, own.pointers(1), own.pointers(0), 0.3, from_average, threads);
        take_numbers(own, 1, results);
    }
}

void run_others(Lists grads, Lists mixed, Lists weights, int threads, Results& results) {
    std::vector<double> sumsq(kCount, 0.0), norm(1, 0.0), norms(kCount, 0.0);
    const Table table(grads.numels, {grads.dtypes[0]}, grads.places);
    l2norm(table, grads.pointers(0), sumsq.data(), kCount, norm.data(), norms.data(), threads);
    results.take_sums(sumsq);
    results.take_sums(norm);
    results.take_sums(norms);
    scale(table, grads.pointers(0), 0.5f, threads);
    take_numbers(grads, 0, results);

    const bool bad = axpby(mixed.table(), 0.5f, mixed.pointers(0), -2.0f, mixed.pointers(1), mixed.pointers(2),
                           kCheckX | kCheckY, threads);
    results.bytes.push_back(bad);
    take_numbers(mixed, 2, results);

    std::vector<int32_t> overflow(kCount, 0);
    std::vector<int64_t> samples(kCount, 0);
    Marked marked(weights.numels);
    cast(weights.table_of_pieces(), weights.pointers(0), weights.pointers(1), overflow.data(), marked.marks(), threads);
    results.take(marked.memory);
    for (size_t i = 0; i < weights.numels.size(); ++i) {
        const uint64_t* bits = marked.memory.data() + marked.offsets[i] + 1;
        const auto count = size_t(count_marked(bits, weights.numels[i], threads));
        std::vector<int32_t> places(count);
        std::vector<uint16_t> taken(count);
        const auto* words = static_cast<const uint16_t*>(weights.pointers(1)[i]);
        results.take(std::vector<uint64_t>{take_marked(bits, words, weights.numels[i], places.data(), false, taken.data(), threads),
                                           digest(words, weights.numels[i], 7, threads), guard(words, weights.numels[i], threads)});
        const GuardAndDigest both = guard_and_digest(words, weights.numels[i], 7, threads);
        results.take(std::vector<uint64_t>{both.guard, both.digest});
        results.take(places);
        results.take(taken);
        std::vector<int64_t> wide_places(count);
        take_marked(bits, words, weights.numels[i], wide_places.data(), true, taken.data(), threads);
        results.take(wide_places);
    }
    const Table written(weights.numels, {weights.dtypes[1]}, weights.places);
    sample(written, weights.pointers(1), samples.data(), threads);
    results.take(overflow);
    results.take(samples);
    results.take(weights.memory[1]);
}

// Numbers of gradients, and of a step: masters are compared with what as many others hold.
void run_measures(Lists grads, Lists weights, int threads, Results& results) {
    std::vector<double> numbers(kCount * kMeasured, 0.0), step(kCount * kCompared, 0.0);
    Lists narrow = grads;
    narrow.places.clear();
    for (int32_t place : grads.places) {
        if (grads.dtypes[0][size_t(place)] != DType::wide) narrow.places.push_back(place);
    }
    const Table table(narrow.numels, {narrow.dtypes[0]}, narrow.places);
    measure(table, narrow.pointers(0), numbers.data(), kCount, threads);
    results.take_sums(numbers);

    std::vector<int64_t> offsets;
    int64_t size = 0;
    for (int64_t numel : weights.numels) {
        const int64_t groups = (numel + 7) / 8;
        offsets.push_back(size);
        size += 8 * (numel <= 16384 ? groups : (groups + 16) / 17);
    }
    const std::vector<float> before(size_t(size), 0.75f);
    compare(weights.table(), weights.pointers(0), weights.pointers(1), before.data(), offsets.data(), step.data(), kCount,
            threads);
    results.take_sums(step);
}

// Masters to weights and remainders, and back.
void run_split(Lists lists, int threads, Results& results) {
    std::vector<int32_t> overflow(kCount, 0);
    Marked marked(lists.numels);
    split(lists.table_of_pieces(), lists.pointers(0), lists.pointers(1), lists.pointers(2), overflow.data(), marked.marks(),
          threads);
    results.take(marked.memory);
    const Table back(lists.numels, {lists.dtypes[1], lists.dtypes[2], lists.dtypes[0]}, lists.places);
    join(back, lists.pointers(1), lists.pointers(2), lists.pointers(0), threads);
    results.take(overflow);
    for (const Bytes& memory : lists.memory) results.take(memory);
}

enum class Step { sgd, momentum, adam, amsgrad, lion, sgd8, adam8 };

bool is_coded(Step kind) { return kind == Step::sgd8 || kind == Step::adam8; }

size_t state_of(Step kind) {
    switch (kind) {
        case Step::sgd: return 0;
        case Step::momentum:
        case Step::lion:
        case Step::sgd8: return 1;
        case Step::adam:
        case Step::adam8: return 2;
        case Step::amsgrad: break;
    }
    return 3;
}

// For each tensor the scales of its state, exactly as many as it has blocks.
std::vector<std::vector<float>> scales_of(const Lists& lists) {
    std::vector<std::vector<float>> scales;
    for (size_t i = 0; i < lists.numels.size(); ++i) {
        const int64_t numel = lists.numels[i], unit = lists.pieces[i].unit == 0 ? numel : lists.pieces[i].unit;
        const int64_t blocks = numel == 0 ? 0 : numel / unit * ((unit + kScaled - 1) / kScaled);
        for (scales.emplace_back(); int64_t(scales.back().size()) < blocks;) {
            scales.back().push_back(scales.back().size() % 5 == 0 ? 0.0f : 0.5f);
        }
    }
    return scales;
}

Pointers pointers_of(std::vector<std::vector<float>>& arrays) {
    Pointers found;
    for (auto& array : arrays) found.push_back(array.data());
    return found;
}

// One step of lists that are gradients, masters or remainders, state, and models where there are any.
void run_step(Lists lists, Step kind, bool has_models, int threads, Results& results) {
    const size_t state = state_of(kind), count = lists.memory.size();
    const Bytes before = lists.memory.back();
    std::vector<Pointers> pointers;
    for (size_t k = 0; k < count; ++k) pointers.push_back(lists.pointers(k));
    std::vector<int32_t> overflow(kCount, 0), group_of;
    std::vector<uint8_t> first;
    for (int i = 0; i < kCount; ++i) {
        group_of.push_back(i % 2);
        first.push_back(uint8_t(i % 3 == 0));
    }
    const Table table = lists.table_of_pieces();
    Marked marked(lists.numels);
    StepLists given{table, pointers[0], pointers[1], {}, has_models ? &pointers.back() : nullptr, group_of,
                    overflow.data(), has_models ? marked.marks() : Marks{nullptr, nullptr}, 5};
    for (size_t k = 0; k < state; ++k) given.state.push_back(&pointers[2 + k]);
    std::vector<std::vector<float>> counts(kCount, std::vector<float>(1, 3.0f)), scales;
    if (is_coded(kind)) scales = scales_of(lists);
    const Pointers steps = pointers_of(counts), scales_at = pointers_of(scales);
    const Number much{0.1, nullptr, 0}, little{0.01, nullptr, 0};
    const SgdGroup sgd[] = {{much, 0.9, 0.1, 0.01, 0, 0}, {little, 0.9, 0.0, 0.0, 1, 1}};
    const AdamGroup adam[] = {{much, 0.9, 0.999, 1e-8, 0.01, 1, 0}, {little, 0.3, 0.99, 0.0, 0.1, 0, 1}};
    const Adam8Group adam8[] = {{adam[0], 7.3f, 0}, {adam[1], 7.4f, 0}};
    const Lion::Group lion[] = {{much, 0.9, 0.99, 0.01, 0, 0}, {little, 0.3, 0.0, 0.1, 1, 0}};
    const auto step = [&](const char* name, const auto& groups) {
        const std::string packed(reinterpret_cast<const char*>(&groups), sizeof(groups));
        const StepFormula& formula = formula_named(name);
        formula.step(given, {formula.is_coded ? &scales_at : nullptr, formula.counts ? &steps : nullptr, first, packed, 0.25f,
                             0.5f, threads});
        for (int32_t place : lists.places) {
            if (counts[size_t(place)][0] != (formula.counts ? 4.0f : 3.0f)) throw std::runtime_error("a count is wrong");
        }
    };
    switch (kind) {
        case Step::sgd:
        case Step::momentum: step("Sgd", sgd); break;
        case Step::adam:
        case Step::amsgrad: step("Adam", adam); break;
        case Step::lion: step("Lion", lion); break;
        case Step::sgd8: step("Sgd8", sgd); break;
        case Step::adam8: step("Adam8", adam8); break;
    }
    for (const auto& own : scales) results.take(own);
    for (size_t k = 0; k < count; ++k) take_numbers(lists, k, results, k == 1 && has_models);
    if (!has_models) return;
    results.take(overflow);
    for (size_t i = 0; i < lists.numels.size(); ++i) {
        if (has_nan(lists.dtypes.back()[i], before[i]) || has_nan(lists.dtypes.back()[i], lists.memory.back()[i])) continue;
        const auto from = marked.memory.begin() + marked.offsets[i];
        results.take(std::vector<uint64_t>(from, from + 1 + (lists.numels[i] + 63) / 64));
    }
}

// Lists for a step; masters beside models are float32, or remainders of 16 or 8 bits.
Lists step_lists(Step kind, bool has_models) {
    const size_t state = state_of(kind);
    return Lists(kCount, int(2 + state + size_t(has_models)), [=] {
        static const DType masters[] = {DType::single, DType::half, DType::byte};
        const DType model = any(2);
        std::vector<DType> row{has_models && below(3) != 0 ? model : DType::single,
                               has_models ? masters[below(3)] : DType::single};
        row.insert(row.end(), state, is_coded(kind) ? DType::byte : DType::single);
        if (has_models) row.push_back(model);
        return row;
    });
}

// Of all results so far, to compare one machine with another. FNV-1a.
uint64_t fingerprint = 0xcbf29ce484222325ull;

// Runs everything at every level, and adds those that ran to `levels`.
void compare_levels(std::vector<std::string>& levels) {
    const Lists grads(kCount, 2, [] {
        const DType from = any(4);
        return std::vector<DType>{from, from == DType::wide ? DType::wide : DType::single};
    });
    const Lists mixed(kCount, 3, [] { return std::vector<DType>{any(3), any(3), any(3)}; });
    const Lists weights(kCount, 2, [] { return std::vector<DType>{DType::single, any(2)}; });
    const Lists splits(kCount, 3, [] { return std::vector<DType>{DType::single, any(2), DType::half}; });
    std::vector<uint8_t> add;
    for (int i = 0; i < kCount; ++i) add.push_back(uint8_t(below(2)));
    const Step kinds[] = {Step::sgd, Step::momentum, Step::adam, Step::amsgrad, Step::lion, Step::sgd8, Step::adam8};
    std::vector<Lists> step_ins;
    for (Step kind : kinds) {
        for (bool has_models : {false, true}) step_ins.push_back(step_lists(kind, has_models));
    }
    std::vector<unsigned char> first;
    for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) {
        use_level((*level)->name);
        if (std::find(levels.begin(), levels.end(), (*level)->name) == levels.end()) levels.push_back((*level)->name);
        for (int threads = 1; threads <= 4; ++threads) {
            Results results;
            run_unscale(grads, add, threads, results);
            run_clip(grads, threads, results);
            run_lerp(grads, threads, results);
            run_others(grads, mixed, weights, threads, results);
            run_measures(grads, weights, threads, results);
            run_split(splits, threads, results);
            for (size_t k = 0; k < step_ins.size(); ++k) run_step(step_ins[k], kinds[k / 2], k % 2 != 0, threads, results);
            if (first.empty()) first = results.bytes;
            if (first != results.bytes) throw std::runtime_error(std::string((*level)->name) + " gives other bits");
        }
    }
    for (unsigned char byte : first) fingerprint = (fingerprint ^ byte) * 0x100000001b3ull;
}

// Several threads call at once: one has the pool, the others work alone.
void call_at_once() {
    std::atomic<int64_t> total{0};
    std::vector<std::thread> callers;
    for (int k = 0; k < 4; ++k) {
        callers.emplace_back([&total] {
            for (int round = 0; round < 200; ++round) {
                parallel_for(50, 3, [&total](int64_t item) { total += item; });
            }
        });
    }
    for (auto& caller : callers) caller.join();
    if (total != 4 * 200 * 1225) throw std::runtime_error("items were lost or done twice");
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
    std::vector<std::string> levels;
    try {
        call_at_once();
        for (int round = 0; round < rounds; ++round) compare_levels(levels);
        try {
            use_level("no such level");
            throw std::logic_error("a wrong level was taken");
        } catch (const std::invalid_argument&) {
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "driver: %s\n", error.what());
        return 1;
    }
    std::string names;
    for (const std::string& level : levels) names += (names.empty() ? "" : ", ") + level;
    std::printf("driver: ran at these SIMD levels: %s\n", names.c_str());
    std::printf("driver: %d rounds, no difference between levels or thread counts, fingerprint %016llx\n", rounds,
                static_cast<unsigned long long>(fingerprint));
    return 0;
}
