// What a step decides between its passes, on the host.
#include "../api.h"
#include "../functors/clip.h"
#include "../functors/loss_scale.h"

namespace fp16opt {

void clip_decision(const double* norm, const float* found_inf, double max_norm, bool only_finite, float* single, float* factor) {
    decide_clip(*norm, found_inf, only_finite, max_norm, single, factor);
}

void follow_scale(bool overflow, float* scale, int32_t* clean, int32_t* skips, const void* settings) {
    follow_overflow(overflow, scale, clean, skips, settings);
}

}  // namespace fp16opt
