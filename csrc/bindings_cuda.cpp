// The Python face of the CUDA operations. It knows no torch: tensors, statistics and the memory that a table lies in come
// as addresses. Compiled by the host compiler, without CUDA's headers.
#include <atomic>
#include <memory>
#include <string>

#include "seen_lists.h"
#include "cuda_api.h"
#include "step_bindings.h"

using namespace fp16opt;

namespace {

// A table in the GPU's memory, for as long as this is there.
class Kept {
public:
    Kept(void* memory, int device) : memory_(memory), device_(device) { ++count; }
    ~Kept() {
        if (memory_ == nullptr) return;
        cuda_give_back(memory_, device_);
        --count;
    }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    uintptr_t memory() const { return reinterpret_cast<uintptr_t>(memory_); }
    void forever() { memory_ = nullptr; }
    static inline std::atomic<int> count{0};  // of tables that were not given back

private:
    void* memory_;
    int device_;
};

// A table with the addresses that were last written for the GPU.
class Table {
public:
    Table(const std::vector<int64_t>& numels, const std::vector<int64_t>& rows,
          const std::vector<std::vector<int32_t>>& codes, const std::vector<int32_t>& places)
        : table_(numels, rows, dtypes_of(codes), places), rows_(rows) {}

    // How many bytes of the memory must be written anew for these addresses: 0 where they are those it has.
    int64_t point(const py::object& addresses, const py::object& add) {
        const PointerLists given(addresses);
        std::vector<Pointers> lists = given.all();
        if (lists.size() > size_t(table_.lists())) lists.resize(size_t(table_.lists()));  // those behind are no table's
        std::vector<uint8_t> flags;
        if (!add.is_none()) flags = flags_of(add, rows_);
        const bool moved = table_.point(lists, flags);
        if (!written_) return table_.copied_bytes();
        return moved ? table_.changing_bytes() : 0;
    }

    // Writes the bytes that the last point() asked for to host memory, and counts them as written.
    void fill(uintptr_t host) {
        table_.fill(address<void>(host), !written_);
        written_ = true;
    }

    // The table at a place of its own, for a graph that is being captured; what was written before stays as it is.
    std::unique_ptr<Kept> keep(int device) const {
        std::vector<char> host(static_cast<size_t>(table_.copied_bytes()));
        table_.fill(host.data(), true);
        return std::make_unique<Kept>(cuda_keep(host.data(), table_.copied_bytes(), table_.all_bytes(), device), device);
    }

    int64_t all_bytes() const { return table_.all_bytes(); }
    int64_t chunks() const { return table_.chunk_count(); }

    Launch at(uintptr_t memory, int device, uintptr_t stream) const {
        return {table_, address<void>(memory), device, address<void>(stream)};
    }

private:
    static std::vector<std::vector<DType>> dtypes_of(const std::vector<std::vector<int32_t>>& codes) {
        std::vector<std::vector<DType>> dtypes;
        for (const auto& list : codes) {
            dtypes.emplace_back();
            for (int32_t code : list) dtypes.back().push_back(static_cast<DType>(code));
        }
        return dtypes;
    }

    CudaTable table_;
    std::vector<int64_t> rows_;
    bool written_ = false;
};

// Where an operation runs, as Python says it: the memory of the table, the device's number, the stream.
struct Where {
    uintptr_t memory;
    int device;
    uintptr_t stream;
};

void bind_finding(py::module_& module) {
    module.def("unscale", [](const Table& table, const Where& where, int64_t n, uintptr_t inv_scale, uintptr_t
                        nonfinite, uintptr_t sumsq, uintptr_t norm, uintptr_t found_inf, bool write) {
        const CudaGradRows rows{address<int32_t>(nonfinite), address<double>(sumsq), n, address<double>(norm),
                                address<float>(found_inf), write};
        cuda_unscale(table.at(where.memory, where.device, where.stream), address<const float>(inv_scale), rows);
    });
    module.def("l2norm", [](const Table& table, const Where& where, int64_t n, uintptr_t sumsq, uintptr_t norm,
                        uintptr_t norms) {
        cuda_l2norm(table.at(where.memory, where.device, where.stream), address<double>(sumsq), n, address<double>(norm),
                    address<double>(norms));
    });
    module.def("cast", [](const Table& table, const Where& where, int64_t n, uintptr_t overflow) {
        cuda_cast(table.at(where.memory, where.device, where.stream), address<int32_t>(overflow), n);
    });
    module.def("sample", [](const Table& table, const Where& where, int64_t n, uintptr_t samples) {
        cuda_sample(table.at(where.memory, where.device, where.stream), address<int64_t>(samples), n);
    });
}

void bind_mapping(py::module_& module) {
    module.def("scale", [](const Table& table, const Where& where, int64_t, uintptr_t factor) {
        cuda_scale(table.at(where.memory, where.device, where.stream), address<const float>(factor));
    });
    module.def("unscale_clipped", [](const Table& table, const Where& where, int64_t, uintptr_t inv_scale,
                        uintptr_t factor) {
        cuda_unscale_clipped(table.at(where.memory, where.device, where.stream), address<const float>(inv_scale),
                             address<const float>(factor));
    });
    module.def("axpby", [](const Table& table, const Where& where, int64_t, float a, float b, uint32_t check,
                        uintptr_t found_inf) {
        cuda_axpby(table.at(where.memory, where.device, where.stream), a, b, (check & 1) != 0, (check & 2) != 0,
                   address<float>(found_inf));
    });
    module.def("take", [](const Table& table, const Where& where, int64_t n, uintptr_t now, uintptr_t then,
                        uintptr_t taken) {
        cuda_take(table.at(where.memory, where.device, where.stream), address<const int64_t>(now),
                  address<const int64_t>(then), address<int32_t>(taken), n);
    });
}

// One block each, over single numbers: `where` says the device and the stream alone.
void bind_decisions(py::module_& module) {
    module.def("capture_scale", [](const Where& where, uintptr_t scale, uintptr_t pair) {
        cuda_capture_scale({where.device, address<void>(where.stream)}, address<const float>(scale), address<float>(pair));
    });
    module.def("decide_clip", [](const Where& where, uintptr_t norm, uintptr_t found_inf, double max_norm,
                                 bool only_finite, uintptr_t single, uintptr_t factor) {
        cuda_decide_clip({where.device, address<void>(where.stream)}, address<const double>(norm),
                         address<const float>(found_inf), max_norm, only_finite, address<float>(single),
                         address<float>(factor));
    });
    module.def("close_step", [](const Where& where, uintptr_t found_inf, uintptr_t last, uintptr_t skipped, uintptr_t scale,
                                uintptr_t clean, uintptr_t skips, uintptr_t settings, uintptr_t flags, uintptr_t kept,
                                int64_t n, uintptr_t cleared, int64_t words) {
        cuda_close_step({where.device, address<void>(where.stream)},
                        {address<const float>(found_inf), address<float>(last), address<double>(skipped),
                         address<float>(scale), address<int32_t>(clean), address<int32_t>(skips),
                         address<const double>(settings), address<const int32_t>(flags), address<int32_t>(kept), n,
                         address<uint32_t>(cleared), words});
    });
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
    module.doc() = "Multi-tensor operations on CUDA memory. fp16opt.kernels.cuda is the guard: call nothing here directly.";
    py::class_<Table>(module, "Table", py::module_local())
        .def(py::init<const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<std::vector<int32_t>>&,
                      const std::vector<int32_t>&>())
        .def("point", &Table::point)
        .def("fill", &Table::fill)
        .def("keep", &Table::keep)
        .def("all_bytes", &Table::all_bytes)
        .def("chunks", &Table::chunks);
    py::class_<Kept>(module, "Kept", py::module_local()).def("memory", &Kept::memory).def("forever", &Kept::forever);
    module.def("kept_tables", [] { return Kept::count.load(); });
    py::class_<Where>(module, "Where", py::module_local()).def(py::init<uintptr_t, int, uintptr_t>());
    bind_seen_lists(module);
    bind_finding(module);
    bind_mapping(module);
    bind_decisions(module);
    bind_stepping<Table, Where, Kept>(module);
    module.def("runs_on", &cuda_runs_on);
    module.attr("architectures") = FP16OPT_CUDA_NAMES;
}
