// The part of DLPack 1.3's C exchange table that is used here. The standard fixes the layout, and torch offers the table
// as `Tensor.__dlpack_c_exchange_api__`, so tensors can be read without torch's headers or its C++ ABI.
#pragma once

#include <cstdint>
#include <cstring>

#include "binding.h"

namespace fp16opt {

struct DLDevice {
    int32_t device_type;
    int32_t device_id;
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct DLPackExchangeAPI {
    uint32_t major;
    uint32_t minor;
    void* previous;
    void* allocate;
    void* export_owned;
    void* import_owned;
    int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);  // borrows; 0, or -1 with an exception set
    void* current_work_stream;
};

// Throws ValueError where the capsule is of another kind or version.
inline const DLPackExchangeAPI* exchange_from(const py::capsule& capsule) {
    const char* name = capsule.name();
    if (name == nullptr || std::strcmp(name, "dlpack_exchange_api") != 0) {
        throw py::value_error("not a DLPack exchange table");
    }
    const auto* api = static_cast<const DLPackExchangeAPI*>(capsule.get_pointer());
    if (api->major != 1 || api->dltensor_from_py_object_no_sync == nullptr) {
        throw py::value_error("this version of the DLPack exchange table is not known");
    }
    return api;
}

}  // namespace fp16opt
