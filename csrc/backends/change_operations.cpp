// Digests and marked elements of single tensors on the CPU: stretches to threads.
#include "../api_changes.h"

#include "../functors/digest.h"
#include "changes_level.h"
#include "lists.h"

namespace fp16opt {
namespace {

constexpr int64_t kStretchOfWords = 65536;
constexpr int64_t kBlocksAhead = 16;  // of 64 words

// Calls compute(stretch, start, length) for stretches of n elements, each a multiple of 64 but for the last.
template <class Compute>
void for_stretches(int64_t n, int threads, Compute&& compute) {
    const int64_t count = (n + kStretchOfWords - 1) / kStretchOfWords;
    parallel_for(count, n < kSerialElements ? 1 : threads, [&](int64_t i) {
        const int64_t start = i * kStretchOfWords, left = n - start;
        compute(size_t(i), start, left < kStretchOfWords ? left : kStretchOfWords);
    });
}

int64_t stretches_of(int64_t n) { return (n + kStretchOfWords - 1) / kStretchOfWords; }

std::vector<int64_t> counts_of(const uint64_t* bits, int64_t n, int threads) {
    std::vector<int64_t> counts(size_t(stretches_of(n)));
    const ChangesLevel* level = current_level().changes;
    for_stretches(n, threads, [&](size_t stretch, int64_t start, int64_t length) {
        counts[stretch] = level->count(bits + start / 64, length);
    });
    return counts;
}

// What sum(start, length) gives for all stretches, added up.
template <class Sum, class Compute>
Sum sum_of_stretches(int64_t n, int threads, Compute&& compute) {
    std::vector<Sum> sums(size_t(stretches_of(n)));
    for_stretches(n, threads, [&](size_t stretch, int64_t start, int64_t length) { sums[stretch] = compute(start, length); });
    Sum total{};
    for (const Sum& sum : sums) total = total + sum;
    return total;
}

template <class Place>
uint32_t take_stretch(const uint64_t* bits, const uint16_t* words, int64_t start, int64_t length, Place* places,
                      uint16_t* taken) {
    uint32_t guard = 0;
    for (int64_t w = start / 64; w * 64 < start + length; ++w) {
        // Blocks without marks are left out, which keeps the processor from seeing what is needed next.
        for (int k = 0; k < 64; k += 32) __builtin_prefetch(words + (w + kBlocksAhead) * 64 + k);
        if (bits[w] == 0) continue;
        uint32_t sum = 0;
        for (uint64_t left = bits[w]; left != 0; left &= left - 1) {
            const int k = __builtin_ctzll(left);
            const uint16_t word = words[w * 64 + k];
            *places++ = Place(w * 64 + k);
            *taken++ = word;
            sum += guard_product(word, k);
        }
        guard += sum * guard_factor(uint32_t(w));
    }
    return guard;
}

}  // namespace

uint64_t digest(const uint16_t* words, int64_t n, uint32_t first, int threads) {
    const ChangesLevel* level = current_level().changes;
    return sum_of_stretches<uint64_t>(n, threads, [&](int64_t start, int64_t length) {
        return level->digest(words + start, length, first + uint32_t(start));
    });
}

uint32_t guard(const uint16_t* words, int64_t n, int threads) {
    const ChangesLevel* level = current_level().changes;
    return sum_of_stretches<uint32_t>(
        n, threads, [&](int64_t start, int64_t length) { return level->guard(words + start, length, start); });
}

GuardAndDigest operator+(const GuardAndDigest& a, const GuardAndDigest& b) { return {a.guard + b.guard, a.digest + b.digest}; }

GuardAndDigest guard_and_digest(const uint16_t* words, int64_t n, uint32_t first, int threads) {
    const ChangesLevel* level = current_level().changes;
    return sum_of_stretches<GuardAndDigest>(n, threads, [&](int64_t start, int64_t length) {  // which a core's cache holds
        return GuardAndDigest{level->guard(words + start, length, start),
                              level->digest(words + start, length, first + uint32_t(start))};
    });
}

int64_t count_marked(const uint64_t* bits, int64_t n, int threads) {
    int64_t total = 0;
    for (int64_t count : counts_of(bits, n, threads)) total += count;
    return total;
}

uint32_t take_marked(const uint64_t* bits, const uint16_t* words, int64_t n, void* places, bool wide, uint16_t* taken,
                     int threads) {
    std::vector<int64_t> firsts = counts_of(bits, n, threads);
    int64_t total = 0;
    for (int64_t& first : firsts) {
        const int64_t count = first;
        first = total;
        total += count;
    }
    std::vector<uint32_t> sums(firsts.size());
    for_stretches(n, threads, [&](size_t stretch, int64_t start, int64_t length) {
        const int64_t first = firsts[stretch];
        sums[stretch] = wide ? take_stretch(bits, words, start, length, static_cast<int64_t*>(places) + first, taken + first)
                             : take_stretch(bits, words, start, length, static_cast<int32_t*>(places) + first, taken + first);
    });
    uint32_t sum = 0;
    for (uint32_t one : sums) sum += one;
    return sum;
}

}  // namespace fp16opt
