// Where a host runs a kernel, its blocks and threads take turns, in an order that is shuffled: a GPU runs them in any, and
// results must not depend on it. What threads of a warp store together waits until all of them had their turn.
#pragma once

#include "../functors/l2norm.h"

FP16OPT_BEGIN

constexpr int kWarp = 32;  // threads that a GPU runs together

// The threads of a warp that have elements, a bit for each: thread `lane` has `left` from its first one on.
FP16OPT_HD uint32_t threads_with_some(int lane, int left) {
    const int count = lane + (left + kGroup - 1) / kGroup;
    return 0xffffffffu >> (count < kWarp ? kWarp - count : 0);
}

FP16OPT_END

#if !defined(__CUDACC__)

extern "C" {
// 0 takes blocks and threads in order; any other number is the state of a generator that puts them in another order for each
// launch and phase.
inline __attribute__((visibility("default"))) uint64_t fp16opt_shuffle = 0;
// How many elements were stored one by one.
inline __attribute__((visibility("default"))) uint64_t fp16opt_single_stores = 0;
}

FP16OPT_BEGIN

// An order of `count` things: the i-th to take is at(i).
class Order {
public:
    explicit Order(int64_t count) : count_(count) {
        if (fp16opt_shuffle == 0 || count < 2) return;
        first_ = next() % count;
        do {
            step_ = 1 + next() % (count - 1);
        } while (divisor(count, step_) != 1);
    }
    int64_t at(int64_t i) const { return (first_ + i * step_) % count_; }

private:
    static int64_t next() {  // Knuth's MMIX generator, of which the upper bits are good
        fp16opt_shuffle = (fp16opt_shuffle * 6364136223846793005ull + 1442695040888963407ull) | (uint64_t(1) << 63);
        return int64_t(fp16opt_shuffle >> 24);
    }
    static int64_t divisor(int64_t a, int64_t b) { return b == 0 ? a : divisor(b, a % b); }

    int64_t count_, first_ = 0, step_ = 1;
};

// What a thread gave to a store of its warp.
struct Given {
    uint32_t words[8];
    int count;  // of words
    char* to;
    int left;
    void (*store)(const Given& own, const uint32_t* end_of_before, int lane);
};

class Turns {
public:
    template <class Phase>
    void run(Phase&& phase) {
        const Order order(kLanes);
        for (int t = 0; t < kLanes; ++t) {
            thread_ = int(order.at(t));
            phase(thread_);
        }
        for (int t = 0; t < kLanes; ++t) {
            for (size_t turn = 0; turn < given_[t].size(); ++turn) store(t, turn);
        }
        for (std::vector<Given>& of : given_) of.clear();
    }
    void give(const Given& given) { given_[thread_].push_back(given); }

private:
    // On a GPU threads that don't meet here would wait for ever, or get another's words.
    void store(int t, size_t turn) const {
        const Given& own = given_[t][turn];
        const int lane = t % kWarp, bytes = 4 * own.count;
        const Given* before = lane == 0 || turn >= given_[t - 1].size() ? nullptr : &given_[t - 1][turn];
        if (lane > 0 && (before == nullptr || before->to + bytes != own.to)) abort();
        for (int other = 0; other < kWarp; ++other) {
            const bool gave = turn < given_[t - lane + other].size();
            if (gave != ((threads_with_some(lane, own.left) >> other & 1u) != 0)) abort();
        }
        own.store(own, before == nullptr ? nullptr : before->words + before->count, lane);
    }

    int thread_ = 0;
    std::vector<Given> given_[kLanes];
};
inline Turns turns;

FP16OPT_END

#endif
