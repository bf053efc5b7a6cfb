#include "qp_error.h"

namespace {
thread_local std::string last_error;
}

namespace qp {
void set_error(const std::string& message) { last_error = message; }
}  // namespace qp

extern "C" const char* qp_last_error() { return last_error.c_str(); }
