// What a linear needs beside its input and output. One per plan: it grows to what the largest step needs and stays.
#pragma once

#include <vector>

#include "aligned.h"

namespace qp {

struct Workspace {
    Aligned x;       // activations as the kernel reads them
    Aligned scales;  // of the activations, per token or per token and group
    Aligned starts;  // of the sums of integer products, likewise
    std::vector<Aligned> scratch;  // per thread
};

}  // namespace qp
