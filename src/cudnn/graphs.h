// The graphs of one plan by capacity: a bounded cache, most recently used first.
#pragma once
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "cudnn/graph.h"

namespace tea::cudnn {

// Thread-safe. A caller that runs a graph holds a reference, so eviction does not destroy it.
class Graphs {
 public:
  using Ref = std::shared_ptr<const Graph>;
  static constexpr size_t kMost = 64;

  // NULL: there is none.
  Ref find(const GraphKey& key) {
    const std::lock_guard lock(mutex_);
    return hit(key);
  }

  // Another thread may have built the same graph meanwhile: the first one stays, and is returned.
  // Evicted graphs are destroyed, which waits for the device, after the lock is released.
  Ref insert(const GraphKey& key, Ref graph) {
    std::list<Entry> evicted;
    const std::lock_guard lock(mutex_);
    if (Ref first = hit(key)) return first;
    recent_.emplace_front(key, graph);
    if (recent_.size() > kMost) evicted.splice(evicted.end(), recent_, std::prev(recent_.end()));
    return graph;
  }

 private:
  using Entry = std::pair<GraphKey, Ref>;

  Ref hit(const GraphKey& key) {
    for (auto it = recent_.begin(); it != recent_.end(); ++it)
      if (it->first == key) {
        recent_.splice(recent_.begin(), recent_, it);
        return it->second;
      }
    return nullptr;
  }

  std::mutex mutex_;
  std::list<Entry> recent_;
};

}  // namespace tea::cudnn
