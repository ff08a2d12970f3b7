#!/bin/sh
# Compiles csrc with a driver, with no Python in it, and runs it under AddressSanitizer and UndefinedBehaviorSanitizer, then
# under ThreadSanitizer where the toolchain links it. Any report makes it exit with 1.
#   usage: tests/native/run_sanitizers.sh [ROUNDS]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../csrc
cxx=${CXX:-c++}
rounds=${1:-10}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

python3 "$csrc/flatten.py" "$build"
flags="-I$build -I$csrc -std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fno-math-errno -Wall -Wextra -Wshadow -Werror -pthread"
case $(uname -m) in
    x86_64 | amd64) levels="portable avx2 avx512" baseline=portable dispatch=-DFP16OPT_X86=1 ;;
    aarch64 | arm64) levels=neon baseline=neon dispatch= ;;
    *) levels=portable baseline=portable dispatch= ;;
esac
avx2="-mavx2 -mfma -mf16c"
avx512="$avx2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -Wno-uninitialized -Wno-maybe-uninitialized"

# compile NAME SANITIZER: builds $build/NAME
compile() {
    jobs=""
    objects=""
    for level in $levels; do
        case $level in
            avx2) more=$avx2 ;;
            avx512) more=$avx512 ;;
            *) more="" ;;
        esac
        for source in cpu cpu_steps; do
            object=$build/$1-$source-$level.o
            $cxx $flags "$2" $more "-DFP16OPT_LEVEL=$level" -c "$csrc/backends/$source.cpp" -o "$object" &
            jobs="$jobs $!"
            objects="$objects $object"
        done
    done
    for job in $jobs; do wait "$job"; done
    $cxx $flags "$2" "-DFP16OPT_BASELINE=$baseline" $dispatch "$csrc/backends/cpu_dispatch.cpp" \
        "$csrc/backends/cpu_operations.cpp" "$csrc/backends/step_operations.cpp" "$csrc/backends/split_operations.cpp" \
        "$csrc/backends/measure_operations.cpp" "$csrc/backends/change_operations.cpp" "$csrc/backends/threads.cpp" \
        "$here/driver.cpp" $objects -o "$build/$1"
}

echo "address and undefined behaviour:"
compile address -fsanitize=address,undefined
ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    "$build/address" "$rounds"

echo 'int main() { return 0; }' > "$build/probe.cpp"
if "$cxx" -fsanitize=thread "$build/probe.cpp" -o "$build/probe" 2> /dev/null && "$build/probe"; then
    echo "threads:"
    compile thread -fsanitize=thread
    TSAN_OPTIONS=halt_on_error=1 "$build/thread" "$rounds"
else
    echo "threads: skipped, this toolchain does not link ThreadSanitizer"
fi
