// The types of elements, as numbers that Python and every backend know.
#pragma once

#include "macros.h"

namespace fp16opt {

enum class DType : int32_t { half = 0, bfloat16 = 1, single = 2, wide = 3, byte = 4 };

FP16OPT_HD int64_t item_size(DType dtype) {
    return dtype == DType::wide ? 8 : dtype == DType::single ? 4 : dtype == DType::byte ? 1 : 2;
}

}  // namespace fp16opt
