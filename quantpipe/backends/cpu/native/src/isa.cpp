#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "qp_error.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#define QP_X86 1
#endif

namespace qp {
namespace {

bool always() { return true; }

#ifdef QP_X86
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
// By hand: not every compiler knows the name.
bool has_avxvnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }
#endif

struct Candidate {
    const char* name;
    const Isa* (*kernels)();
    bool (*has_instructions)();
};

constexpr Candidate kBestFirst[] = {
    {"avx512", isa_avx512, has_avx512},
    {"avxvnni", isa_avxvnni, has_avxvnni},
    {"avx2", isa_avx2, has_avx2},
    {"scalar", isa_scalar, always},
};
constexpr Candidate kEmulated = {"emulated", isa_emulated, always};
constexpr const char* kNames = "scalar, avx2, avxvnni, avx512";

struct Choice {
    const Isa* isa = nullptr;
    std::string note;
};

// Why a candidate is not used, or an empty string.
std::string why_not(const Candidate& candidate) {
    if (candidate.kernels() == nullptr) return "the library was compiled without it";
    if (!candidate.has_instructions()) return "this CPU lacks it";
    const char* fault = find_fault(*candidate.kernels());
    return fault == nullptr ? "" : fault;
}

// The best that works from `highest` down (null: from the best), and why those above it were passed over where a user
// would wonder.
Choice choose(const char* highest) {
    Choice choice;
    bool is_reached = highest == nullptr;
    for (const Candidate& candidate : kBestFirst) {
        is_reached = is_reached || std::strcmp(candidate.name, highest) == 0;
        if (!is_reached) continue;
        const std::string reason = why_not(candidate);
        if (reason.empty() || candidate.kernels == isa_scalar) {
            choice.isa = candidate.kernels();
            break;
        }
        const bool is_wanted = highest != nullptr || candidate.has_instructions();
        if (is_wanted) choice.note += std::string(candidate.name) + " kernels are not used: " + reason + "; ";
    }
    if (choice.isa == nullptr) {
        choice = choose(nullptr);
        choice.note = "QUANTPIPE_CPU_ISA is '" + std::string(highest) + "', which is none of " + kNames + "; ";
    }
    if (choice.isa == isa_scalar() && highest == nullptr) choice.note += "no vector instructions are used, slower; ";
    return choice;
}

Choice& current() {
    static Choice choice = [] {
        Choice chosen = choose(std::getenv("QUANTPIPE_CPU_ISA"));
        if (!chosen.note.empty()) chosen.note += std::string(chosen.isa->name) + " ones are";
        return chosen;
    }();
    return choice;
}

}  // namespace

const Isa& isa() { return *current().isa; }

}  // namespace qp

extern "C" {

const char* qp_isa_name() { return qp::isa().name; }

const char* qp_isa_note() { return qp::current().note.c_str(); }

int32_t qp_isa_select(const char* name) {
    const auto use = [&](const qp::Candidate& candidate) -> int32_t {
        const std::string reason = qp::why_not(candidate);
        if (!reason.empty()) {
            qp::set_error(std::string(name) + " kernels: " + reason + "; use a lower set");
            return -1;
        }
        qp::current() = {candidate.kernels(), ""};
        return 0;
    };
    if (std::strcmp(name, qp::kEmulated.name) == 0) return use(qp::kEmulated);
    for (const qp::Candidate& candidate : qp::kBestFirst) {
        if (std::strcmp(name, candidate.name) == 0) return use(candidate);
    }
    qp::set_error("instruction set '" + std::string(name) + "' is not known; use one of " + qp::kNames);
    return -1;
}
}
