// Blocks of a CUDA kernel as its PTX says, instruction by instruction: the threads of a block take turns between barriers
// and shuffles, blocks run one after the other. tests/kernels/ptx_machine.py turns PTX into the table of instructions.
#include <cfenv>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

enum Op : int32_t {
    kAdd, kSub, kMul, kMulHi, kMulWide, kMad, kFma, kDiv, kRem, kRcp, kSqrt, kRsqrt, kNeg, kAbs, kMin, kMax, kAnd, kOr, kXor, kNot, kShl, kShr,
    kMov, kPack, kUnpack, kSelp, kCvt, kSetp, kBfi, kBfe, kShf, kPrmt, kLdParam, kLdShared, kLdGlobal, kStShared, kStGlobal, kAtomAdd, kAtomOr,
    kBra, kRet, kBar, kShfl, kNop
};
enum Type : int32_t { U8, S8, U16, S16, U32, S32, U64, S64, F16, F32, F64, PRED };
enum Compare : int32_t { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

struct Instruction {
    int32_t op, type, from, extra;  // extra: comparison, target, parameter, bits of a part, a guess, a shuffle by xor, how a funnel shifts
    int32_t guard, negated, count, down;  // down: rounds toward zero, or with 2 down
    int32_t to[4], given[4];
    int64_t offset;
};

enum State : uint8_t { kRuns, kAtBarrier, kShuffles, kDone };
constexpr int kThreads = 256, kWarp = 32;

sigjmp_buf escape;
void escaped(int) { siglongjmp(escape, 1); }

template <class T> T as(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T> uint64_t bits_of(T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}
// A card has one nan for all.
template <> uint64_t bits_of<float>(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fffffffu : bits;
}
template <> uint64_t bits_of<double>(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return value != value ? 0x7fffffffffffffffull : bits;
}

uint64_t half_of(float value, bool down) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude == 0x7f800000u) return sign | 0x7c00u;
    const double wide = std::fabs(double(value));
    if (wide == 0) return sign;
    int exponent;
    std::frexp(wide, &exponent);
    const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
    const double scaled = std::ldexp(wide, -unit);
    const double whole = down ? std::trunc(scaled) : std::nearbyint(scaled);
    const double back = std::ldexp(whole, unit);
    if (back >= 65536.0) return sign | (down ? 0x7bffu : 0x7c00u);
    if (back < std::ldexp(1.0, -14)) return sign | uint32_t(std::ldexp(back, 24));
    std::frexp(back, &exponent);
    return sign | (uint32_t(exponent + 14) << 10) | (uint32_t(std::ldexp(back, 11 - exponent)) & 0x3ffu);
}
float of_half(uint64_t half) {
    const int exponent = int(half >> 10 & 31);
    const uint32_t mantissa = uint32_t(half & 0x3ff);
    const float sign = (half & 0x8000u) != 0 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(float(mantissa), -24);
    return sign * std::ldexp(float(mantissa | 0x400u), exponent - 25);
}

// An approximation is off by one in its last place, up, down or not at all.
template <class T> T guessed(const Instruction& i, T right) {
    if constexpr (std::is_same_v<T, float>) {
        if (i.extra == 0 || !std::isfinite(right)) return right;
        uint32_t bits;
        memcpy(&bits, &right, 4);
        bits += bits % 3u - 1u;
        memcpy(&right, &bits, 4);
    }
    return right;
}

template <class T> uint64_t arithmetic(const Instruction& i, const uint64_t* r) {
    using U = std::conditional_t<std::is_floating_point_v<T>, T, std::make_unsigned_t<std::conditional_t<std::is_floating_point_v<T>, int, T>>>;
    const T a = as<T>(r[i.given[0]]), b = i.given[1] < 0 ? T() : as<T>(r[i.given[1]]), c = i.given[2] < 0 ? T() : as<T>(r[i.given[2]]);
    if (i.down != 0) std::fesetround(i.down == 1 ? FE_TOWARDZERO : FE_DOWNWARD);
    volatile T x = a, y = b, z = c;
    T result = T();
    switch (i.op) {
        case kAdd: result = T(U(x) + U(y)); break;
        case kSub: result = T(U(x) - U(y)); break;
        case kMul: result = T(U(x) * U(y)); break;
        case kMad: result = T(U(a) * U(b) + U(c)); break;
        case kFma: if constexpr (std::is_floating_point_v<T>) result = std::fma(T(x), T(y), T(z)); break;
        case kDiv:
            if constexpr (std::is_floating_point_v<T>) result = x / y;
            else result = b == 0 ? T(-1) : T(a / b);
            break;
        case kRem:
            if constexpr (!std::is_floating_point_v<T>) result = b == 0 ? a : T(a % b);
            break;
        case kRcp: result = guessed(i, T(T(1) / x)); break;
        case kSqrt: if constexpr (std::is_floating_point_v<T>) result = std::sqrt(T(x)); break;
        case kRsqrt: if constexpr (std::is_floating_point_v<T>) result = guessed(i, T(1) / std::sqrt(T(x))); break;
        case kNeg:
            if constexpr (std::is_floating_point_v<T>) result = -a;
            else result = T(U(0) - U(a));
            break;
        case kAbs: result = a < 0 ? T(-a) : a; if constexpr (std::is_floating_point_v<T>) result = std::fabs(a); break;
        case kMin: if constexpr (std::is_floating_point_v<T>) result = std::fmin(a, b); else result = a < b ? a : b; break;
        case kMax: if constexpr (std::is_floating_point_v<T>) result = std::fmax(a, b); else result = a < b ? b : a; break;
        default: break;
    }
    if (i.down != 0) std::fesetround(FE_TONEAREST);
    return bits_of<T>(result);
}

template <class T> bool compares(int how, T a, T b) {
    bool unordered = false;
    if constexpr (std::is_floating_point_v<T>) unordered = a != a || b != b;
    switch (how) {
        case EQ: return !unordered && a == b;
        case NE: return !unordered && a != b;
        case LT: return !unordered && a < b;
        case LE: return !unordered && a <= b;
        case GT: return !unordered && a > b;
        case GE: return !unordered && a >= b;
        case EQU: return unordered || a == b;
        case NEU: return unordered || a != b;
        case LTU: return unordered || a < b;
        case LEU: return unordered || a <= b;
        case GTU: return unordered || a > b;
        case GEU: return unordered || a >= b;
        case NUM: return !unordered;
        default: return unordered;
    }
}

#define BY_TYPE(type, call)                          \
    switch (type) {                                  \
        case U8: call(uint8_t); break;               \
        case S8: call(int8_t); break;                \
        case U16: call(uint16_t); break;             \
        case S16: call(int16_t); break;              \
        case U32: call(uint32_t); break;             \
        case S32: call(int32_t); break;              \
        case U64: call(uint64_t); break;             \
        case S64: call(int64_t); break;              \
        case F32: call(float); break;                \
        case F64: call(double); break;               \
        default: break;                              \
    }

const int kSizes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 1};

uint64_t loaded(const unsigned char* at, int type) {
    uint64_t bits = 0;
    memcpy(&bits, at, size_t(kSizes[type]));
    switch (type) {
        case S8: return uint64_t(int64_t(int8_t(bits)));
        case S16: return uint64_t(int64_t(int16_t(bits)));
        case S32: return uint64_t(int64_t(int32_t(bits)));
        default: return bits;
    }
}

template <class To, class From> To whole(From value) {  // as cvt.rzi saturates
    if constexpr (std::is_floating_point_v<From>) {
        if (value != value) return 0;
        const double low = double(std::is_signed_v<To> ? -std::ldexp(1.0, int(8 * sizeof(To)) - 1) : 0.0);
        const double high = std::ldexp(1.0, int(8 * sizeof(To)) - int(std::is_signed_v<To>));
        if (double(value) <= low) return std::is_signed_v<To> ? To(int64_t(1) << (8 * sizeof(To) - 1)) : To(0);
        if (double(value) >= high) return To(~uint64_t(0) >> (64 - 8 * sizeof(To) + int(std::is_signed_v<To>)));
        return To(value);
    } else {
        return To(value);
    }
}

template <class From> uint64_t converted(const Instruction& i, From value) {
    if (i.down != 0) std::fesetround(FE_TOWARDZERO);
    volatile From given = value;
    uint64_t result = 0;
    switch (i.type) {
        case F16: result = half_of(float(value), i.down != 0); break;
        case F32: result = bits_of<float>(float(given)); break;
        case F64: result = bits_of<double>(double(given)); break;
        case U8: result = whole<uint8_t>(value); break;
        case S8: result = uint64_t(int64_t(whole<int8_t>(value))); break;
        case U16: result = whole<uint16_t>(value); break;
        case S16: result = uint64_t(int64_t(whole<int16_t>(value))); break;
        case U32: result = whole<uint32_t>(value); break;
        case S32: result = uint64_t(int64_t(whole<int32_t>(value))); break;
        case U64: result = whole<uint64_t>(value); break;
        case S64: result = uint64_t(whole<int64_t>(value)); break;
        default: break;
    }
    if (i.down != 0) std::fesetround(FE_TONEAREST);
    return result;
}

void compute(const Instruction& i, uint64_t* r) {
    uint64_t& to = r[i.to[0]];
    const int bits = 8 * kSizes[i.type];
    const uint64_t mask = i.type == PRED ? 1 : bits == 64 ? ~uint64_t(0) : (uint64_t(1) << bits) - 1;
    switch (i.op) {
        case kAnd: to = r[i.given[0]] & r[i.given[1]] & mask; return;
        case kOr: to = (r[i.given[0]] | r[i.given[1]]) & mask; return;
        case kXor: to = (r[i.given[0]] ^ r[i.given[1]]) & mask; return;
        case kNot: to = ~r[i.given[0]] & mask; return;
        case kMov: to = r[i.given[0]] & mask; return;
        case kSelp: to = r[i.given[(r[i.given[2]] & 1) != 0 ? 0 : 1]] & mask; return;
        case kShl: {
            const uint64_t by = r[i.given[1]] & 0xffffffffu;
            to = by >= uint64_t(bits) ? 0 : (r[i.given[0]] << by) & mask;
            return;
        }
        case kShr: {
            uint64_t by = r[i.given[1]] & 0xffffffffu;
            const bool is_signed = i.type == S16 || i.type == S32 || i.type == S64;
            if (is_signed) {
                by = by >= uint64_t(bits) ? uint64_t(bits - 1) : by;
                const int64_t value = int64_t(r[i.given[0]] << (64 - bits)) >> (64 - bits);
                to = uint64_t(value >> by) & mask;
            } else {
                to = by >= uint64_t(bits) ? 0 : (r[i.given[0]] & mask) >> by;
            }
            return;
        }
        case kPack: {
            const uint64_t part = (uint64_t(1) << i.extra) - 1;
            uint64_t value = 0;
            for (int k = 0; k < i.count; ++k) value |= (r[i.given[k]] & part) << (k * i.extra);
            to = value;
            return;
        }
        case kUnpack: {
            const uint64_t part = (uint64_t(1) << i.extra) - 1, value = r[i.given[0]];
            for (int k = 0; k < i.count; ++k) r[i.to[k]] = value >> (k * i.extra) & part;
            return;
        }
        case kMulHi:
            to = i.type == S64 ? uint64_t((__int128(int64_t(r[i.given[0]])) * int64_t(r[i.given[1]])) >> 64)
                 : i.type == U64 ? uint64_t((static_cast<unsigned __int128>(r[i.given[0]]) * r[i.given[1]]) >> 64)
                                 : uint64_t(uint32_t(r[i.given[0]])) * uint32_t(r[i.given[1]]) >> 32;
            return;
        case kMulWide:
            to = i.type == S32 ? uint64_t(int64_t(int32_t(r[i.given[0]])) * int32_t(r[i.given[1]]))
                               : uint64_t(uint32_t(r[i.given[0]])) * uint32_t(r[i.given[1]]);
            return;
        case kBfi: {
            const uint64_t count = r[i.given[3]] & 255, at = r[i.given[2]] & 255;
            const uint64_t field = at >= 64 ? 0 : (count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1) << at;
            to = ((r[i.given[1]] & ~field) | ((at >= 64 ? 0 : r[i.given[0]] << at) & field)) & mask;
            return;
        }
        case kBfe: {  // of 32 bits, behind which are zeros or copies of the sign
            const uint64_t at = r[i.given[1]] & 255, count = r[i.given[2]] & 255, above = count > 32 ? 32 : 64 - count;
            const int64_t whole = i.type == S32 ? int64_t(int32_t(r[i.given[0]])) : int64_t(uint32_t(r[i.given[0]]));
            const uint64_t upper = count == 0 ? 0 : uint64_t(whole >> (at > 63 ? 63 : at)) << above;
            to = (count == 0 ? 0 : i.type == S32 ? uint64_t(int64_t(upper) >> above) : upper >> above) & mask;
            return;
        }
        case kShf: {  // of 64 bits, of which the second is the upper half
            const uint64_t given = r[i.given[2]] & 0xffffffffu, by = (i.extra & 2) == 0 ? given & 31 : given > 32 ? 32 : given;
            const uint64_t both = (r[i.given[0]] & 0xffffffffu) | r[i.given[1]] << 32;
            to = (i.extra & 1) != 0 ? both << by >> 32 : both >> by & 0xffffffffu;
            return;
        }
        case kPrmt: {
            const uint64_t both = (r[i.given[0]] & 0xffffffffu) | r[i.given[1]] << 32;
            uint64_t value = 0;
            for (int k = 0; k < 4; ++k) {
                const uint64_t nibble = r[i.given[2]] >> (4 * k) & 15, byte = both >> (8 * (nibble & 7)) & 255;
                value |= (nibble < 8 ? byte : 255 * (byte >> 7)) << (8 * k);
            }
            to = value;
            return;
        }
        case kSetp: {
            bool result = false;
#define COMPARED(T) result = compares<T>(i.extra, as<T>(r[i.given[0]]), as<T>(r[i.given[1]]))
            BY_TYPE(i.type, COMPARED)
            to = result;
            return;
        }
        case kCvt:
            if (i.from == F16) {
                to = converted<float>(i, of_half(r[i.given[0]]));
                return;
            }
#define CONVERTED(T) to = converted<T>(i, as<T>(r[i.given[0]]))
            BY_TYPE(i.from, CONVERTED)
            return;
        default:
#define COMPUTED(T) to = arithmetic<T>(i, r)
            BY_TYPE(i.type, COMPUTED)
            return;
    }
}

struct Machine {
    const Instruction* code;
    const unsigned char* const* arguments;
    unsigned char* seen;  // by instruction: 1 where it was executed, 2 where its guard kept it from that
    int64_t* counts;      // by instruction: how often it was executed
    int64_t left;
    int64_t* accesses;  // what a thread that is watched does to global memory: (address, bytes; negative for stores); null: none is
    int64_t room;
    std::vector<unsigned char> shared;
    int64_t shared_base;

    unsigned char* in_shared(uint64_t address, int size) {
        const uint64_t at = address - uint64_t(shared_base);
        if (at + uint64_t(size) > shared.size()) siglongjmp(escape, 1);
        return shared.data() + at;
    }

    void note(uint64_t address, int64_t size) {
        if (accesses == nullptr) return;
        if (--room < 0) siglongjmp(escape, 2);
        *accesses++ = int64_t(address);
        *accesses++ = size;
    }

    // Runs a thread until it waits. Returns where it goes on.
    int run(int at, uint64_t* r, State& state) {
        for (;;) {
            const Instruction& i = code[at++];
            if (--left < 0) siglongjmp(escape, 2);
            const bool is_kept = i.guard >= 0 && ((r[i.guard] & 1) != 0) == (i.negated != 0);
            seen[at - 1] |= is_kept ? 2 : 1;
            if (is_kept) continue;
            ++counts[at - 1];
            const int size = kSizes[i.type];
            switch (i.op) {
                case kNop: break;
                case kRet: state = kDone; return at;
                case kBra: at = i.extra; break;
                case kBar: state = kAtBarrier; return at;
                case kShfl: state = kShuffles; return at;
                case kLdParam:
                    for (int k = 0; k < i.count; ++k) r[i.to[k]] = loaded(arguments[i.extra] + i.offset + k * size, i.type);
                    break;
                case kLdShared: {
                    const unsigned char* from = in_shared(r[i.given[0]] + uint64_t(i.offset), size * i.count);
                    for (int k = 0; k < i.count; ++k) r[i.to[k]] = loaded(from + k * size, i.type);
                    break;
                }
                case kLdGlobal: {
                    const uint64_t address = r[i.given[0]] + uint64_t(i.offset);
                    if (address % uint64_t(size * i.count) != 0) siglongjmp(escape, 1);  // as a card traps
                    note(address, size * i.count);
                    for (int k = 0; k < i.count; ++k) r[i.to[k]] = loaded(reinterpret_cast<unsigned char*>(address) + k * size, i.type);
                    break;
                }
                case kStShared: {
                    unsigned char* to = in_shared(r[i.to[0]] + uint64_t(i.offset), size * i.count);
                    for (int k = 0; k < i.count; ++k) memcpy(to + k * size, &r[i.given[k]], size_t(size));
                    break;
                }
                case kStGlobal: {
                    const uint64_t address = r[i.to[0]] + uint64_t(i.offset);
                    if (address % uint64_t(size * i.count) != 0) siglongjmp(escape, 1);
                    note(address, -size * i.count);
                    for (int k = 0; k < i.count; ++k) memcpy(reinterpret_cast<unsigned char*>(address) + k * size, &r[i.given[k]], size_t(size));
                    break;
                }
                case kAtomAdd:
                case kAtomOr: {
                    const uint64_t address = r[i.given[0]] + uint64_t(i.offset);
                    note(address, 4);
                    uint32_t* word = reinterpret_cast<uint32_t*>(address);
                    const uint32_t before = *word, given = uint32_t(r[i.given[1]]);
                    *word = i.op == kAtomAdd ? before + given : before | given;
                    r[i.to[0]] = before;
                    break;
                }
                default: compute(i, r);
            }
        }
    }
};

}  // namespace

// Runs a grid. `registers` of each thread begin with `constants`; %tid, %ctaid are in `special`. Returns 0, or 1 for an access
// that is not allowed, 2 where more than `limit` instructions would run. `executed`: how many did; `seen`, `counts`: see Machine.
// `accesses`: room for `accessed` of them, of the first thread; how many there were is put there.
extern "C" int ptx_run(const Instruction* code, const uint64_t* constants, int constant_count, int registers, const int* special,
                       int64_t shared_size, int64_t shared_base, int64_t blocks, const unsigned char* const* arguments, int64_t limit,
                       int64_t* executed, unsigned char* seen, int64_t* counts, int64_t* accesses, int64_t* accessed) {
    struct sigaction now {}, segv, bus, fpe;
    now.sa_handler = escaped;
    now.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &now, &segv);
    sigaction(SIGBUS, &now, &bus);
    sigaction(SIGFPE, &now, &fpe);
    static std::vector<uint64_t> files;
    files.assign(size_t(registers) * kThreads, 0);
    static Machine machine;
    machine = {code, arguments, seen, counts, limit, nullptr, *accessed, std::vector<unsigned char>(size_t(shared_size)), shared_base};
    const int outcome = sigsetjmp(escape, 1);
    if (outcome == 0) {
        for (int64_t block = 0; block < blocks; ++block) {
            State states[kThreads];
            int places[kThreads];
            for (int t = 0; t < kThreads; ++t) {
                uint64_t* r = &files[size_t(t) * size_t(registers)];
                memcpy(r, constants, size_t(constant_count) * 8);
                const uint64_t values[] = {uint64_t(t), kThreads, uint64_t(block), uint64_t(blocks)};
                for (int k = 0; k < 4; ++k) r[special[k]] = values[k];
                states[t] = kRuns;
                places[t] = 0;
            }
            for (bool alive = true; alive;) {
                alive = false;
                for (int first = 0; first < kThreads; first += kWarp) {
                    for (bool shuffled = true; shuffled;) {
                        shuffled = false;
                        for (int t = first; t < first + kWarp; ++t) {
                            if (states[t] != kRuns) continue;
                            const bool is_watched = block == 0 && t == 0;
                            if (is_watched) machine.accesses = accesses;
                            places[t] = machine.run(places[t], &files[size_t(t) * size_t(registers)], states[t]);
                            if (is_watched) accesses = machine.accesses;
                            machine.accesses = nullptr;
                        }
                        // Those that a thread's mask names are to be at the same shuffle: it waits for them.
                        for (int lane = 0; lane < kWarp; ++lane) {
                            const int t = first + lane;
                            if (states[t] != kShuffles) continue;
                            const Instruction& i = code[places[t] - 1];
                            const auto file = [&](int other) { return &files[size_t(first + other) * size_t(registers)]; };
                            const uint32_t mask = uint32_t(file(lane)[i.given[2]]);
                            bool is_complete = (mask >> lane & 1u) != 0;
                            uint64_t values[kWarp];
                            for (int other = 0; other < kWarp; ++other) {
                                if ((mask >> other & 1u) == 0) continue;
                                is_complete = is_complete && states[first + other] == kShuffles && places[first + other] == places[t];
                                values[other] = file(other)[i.given[0]];
                            }
                            if (!is_complete) continue;
                            for (int other = 0; other < kWarp; ++other) {
                                if ((mask >> other & 1u) == 0) continue;
                                uint64_t* r = file(other);
                                const int by = int(r[i.given[1]] & 31), from = i.extra != 0 ? other ^ by : other - by;
                                const bool is_inside = from >= 0;
                                r[i.to[0]] = (is_inside && (mask >> from & 1u) != 0 ? values[from] : values[other]) & 0xffffffffu;
                                if (i.to[1] >= 0) r[i.to[1]] = is_inside;
                                states[first + other] = kRuns;
                            }
                            shuffled = true;
                        }
                    }
                }
                for (int t = 0; t < kThreads; ++t) {
                    if (states[t] == kShuffles) siglongjmp(escape, 2);  // it would wait for ever
                    if (states[t] != kAtBarrier) continue;
                    states[t] = kRuns;
                    alive = true;
                }
            }
        }
    }
    std::fesetround(FE_TONEAREST);
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    sigaction(SIGFPE, &fpe, nullptr);
    *executed = limit - machine.left;
    *accessed -= machine.room;
    return outcome;
}
