// Memory between two pages without access rights: an access outside, of even one byte, crashes.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace tea::kit {

// Which end of the data lies on the border. The other one has up to a page of room.
enum class Flush { kStart, kEnd };

class Guarded {
 public:
  Guarded(size_t bytes, Flush flush) : bytes_(bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inside = (bytes + page - 1) / page * page;
    mapped_ = inside + 2 * page;
    void* at = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    map_ = static_cast<uint8_t*>(at);
    if (inside && mprotect(map_ + page, inside, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    data_ = map_ + page + (flush == Flush::kEnd ? inside - bytes : 0);
  }
  ~Guarded() { munmap(map_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  size_t bytes_, mapped_ = 0;
  uint8_t *map_ = nullptr, *data_ = nullptr;
};

}  // namespace tea::kit
