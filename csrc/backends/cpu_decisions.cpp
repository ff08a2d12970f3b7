// What a step decides between its passes, on the host.
#include "../api.h"
#include "../functors/clip.h"
#include "../functors/loss_scale.h"

namespace fp16opt {

float clip_decision(double norm, float found_inf, bool only_finite, double max_norm) {
    return decided_factor(norm, found_inf, only_finite, max_norm);
}

void follow_scale(bool overflow, float* scale, int32_t* clean, int32_t* skips, const void* settings) {
    follow_overflow(overflow, scale, clean, skips, settings);
}

}  // namespace fp16opt
