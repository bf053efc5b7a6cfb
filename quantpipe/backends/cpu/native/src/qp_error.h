// Why the last call of this thread failed: one line, "where: found; what to do".
#pragma once

#include <string>

namespace qp {
void set_error(const std::string& message);
}

extern "C" const char* qp_last_error();
