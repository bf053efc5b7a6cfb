// Memory that begins on a cache line and is zero when it is new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace qp {

class Aligned {
   public:
    static constexpr size_t kLine = 64;

    Aligned() = default;
    explicit Aligned(size_t num_bytes) { reset(num_bytes); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    Aligned(Aligned&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Aligned& operator=(Aligned&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Aligned() { std::free(data_); }

    // At least so many bytes; what was held before is lost where the memory grows.
    void grow(size_t num_bytes) {
        if (num_bytes > size_) reset(num_bytes);
    }
    size_t size() const { return size_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

   private:
    void reset(size_t num_bytes) {
        std::free(data_);
        data_ = nullptr;
        size_ = (num_bytes + kLine - 1) / kLine * kLine;
        if (size_ == 0) return;
        data_ = std::aligned_alloc(kLine, size_);
        if (data_ == nullptr) {
            size_ = 0;
            throw std::bad_alloc();
        }
        std::memset(data_, 0, size_);
    }

    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace qp
