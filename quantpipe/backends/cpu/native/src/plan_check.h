// What is wrong with a layer or a step, as part of a line; empty where nothing is.
#pragma once

#include <string>

#include "plan_parts.h"

namespace qp {

std::string wrong_linear(const char* name, const Linear* linear, int num_out, int num_in);
std::string wrong_sizes(const Plan& plan, const qp_layer& sizes);
std::string wrong_linears(const Plan& plan, const Layer& layer);
std::string wrong_step(const Plan& plan, const qp_batch& batch, const qp_kv& kv);
bool is_kind(int kind);

}  // namespace qp
