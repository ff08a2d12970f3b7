#include "../launch/threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif
#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#define FP16OPT_MXCSR 1
#endif

namespace fp16opt {
namespace {

// Rounding to nearest with subnormals kept, for as long as it lives: neither the caller's flush mode nor the mode that a
// worker inherited from the thread that started it may change the bits of a result.
class DefaultFloatMode {
public:
    DefaultFloatMode() {
#if defined(FP16OPT_MXCSR)
        saved_ = _mm_getcsr();
        _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
        __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
        __asm__ __volatile__("msr fpcr, %0" : : "r"(uint64_t(0)));
#endif
    }
    ~DefaultFloatMode() {
#if defined(FP16OPT_MXCSR)
        _mm_setcsr(saved_);
#elif defined(__aarch64__)
        __asm__ __volatile__("msr fpcr, %0" : : "r"(saved_));
#endif
    }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

private:
#if defined(FP16OPT_MXCSR)
    unsigned int saved_ = 0;
#elif defined(__aarch64__)
    uint64_t saved_ = 0;
#endif
};

struct Job {
    Task task;
    void* context;
    int64_t count;
    std::atomic<int64_t> next{0};

    void work() {
        DefaultFloatMode mode;
        for (int64_t item = next.fetch_add(1, std::memory_order_relaxed); item < count;
             item = next.fetch_add(1, std::memory_order_relaxed)) {
            task(context, item);
        }
    }
};

class Pool {
public:
    // False where another caller's job is running.
    bool run(Job& job, int threads) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return false;
        start_workers(threads - 1);
        {
            std::lock_guard<std::mutex> lock(state_);
            job_ = &job;
            seats_ = threads - 1;
            ++round_;
        }
        wake_.notify_all();
        job.work();
        // A worker that wakes up only now finds no job, so no call waits for it.
        std::unique_lock<std::mutex> lock(state_);
        job_ = nullptr;
        done_.wait(lock, [this] { return active_ == 0; });
        return true;
    }

private:
    void start_workers(int wanted) {
        while (workers_ < wanted) {
            try {
                std::thread([this] { serve(); }).detach();
            } catch (const std::system_error&) {
                return;  // the system has no more threads to give: those that exist do the work
            }
            ++workers_;
        }
    }

    void serve() {
#if !defined(_WIN32)
        sigset_t all;  // signals belong to the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
#endif
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(state_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (job_ == nullptr || seats_ == 0) continue;
            Job& job = *job_;
            --seats_;
            ++active_;
            lock.unlock();
            job.work();
            lock.lock();
            if (--active_ == 0) done_.notify_all();
        }
    }

    std::mutex turn_;
    std::mutex state_;
    std::condition_variable wake_;
    std::condition_variable done_;
    Job* job_ = nullptr;
    uint64_t round_ = 0;
    int seats_ = 0;
    int active_ = 0;
    int workers_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends.
std::atomic<Pool*> the_pool{nullptr};

// A forked child has the pool's memory but not its threads, and its locks may be held by threads that do not exist
// there. The child forgets it and starts its own with the next call.
void forget_pool() { the_pool.store(nullptr, std::memory_order_relaxed); }

Pool& pool() {
    Pool* existing = the_pool.load(std::memory_order_acquire);
    if (existing != nullptr) return *existing;
#if !defined(_WIN32)
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
#endif
    Pool* made = new Pool;
    if (the_pool.compare_exchange_strong(existing, made, std::memory_order_acq_rel)) return *made;
    delete made;  // another thread was first; this one has no workers yet
    return *existing;
}

}  // namespace

void run_parallel(int64_t count, int threads, Task task, void* context) {
    if (count <= 0) return;
    Job job{task, context, count};
    if (int64_t(threads) > count) threads = int(count);
    if (threads > 1 && pool().run(job, threads)) return;
    job.work();
}

}  // namespace fp16opt
