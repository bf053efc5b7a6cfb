// Runs a step that was found sound.
#pragma once

#include "plan_parts.h"

namespace qp {

void forward(Step& step, float* logits, int32_t* argmax);
// What lies between the linears before and after attention, of the first layer.
void attention_part(Step& step, const float* qkv, float* attended);

}  // namespace qp
