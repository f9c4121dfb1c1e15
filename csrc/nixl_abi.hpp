// Posting NIXL transfer requests without Python, through the C ABI that comes with NIXL's wheel (libnixl_capi.so).
#pragma once

#include <cstdint>
#include <string>
#include <typeinfo>

namespace pd {

enum class Posted { done, in_progress, failed };

class NixlAbi {
  public:
    // `agent` is the address of a nixlAgent that outlives this object. Throws std::runtime_error when the library
    // cannot be loaded, lacks a function, or is the stub that NIXL ships where it was built without itself.
    NixlAbi(const std::string &library, std::uintptr_t agent);

    // Both may be called by any thread when the agent locks (NIXL_THREAD_SYNC_STRICT).
    Posted post(std::uintptr_t request) const;
    Posted status(std::uintptr_t request) const;

  private:
    // What libnixl_capi calls nixl_capi_agent_s and nixl_capi_xfer_req_s: structs of one pointer.
    struct Box {
        void *inner;
    };
    using PostCall = int (*)(Box *agent, Box *request, void *options);
    using StatusCall = int (*)(Box *agent, Box *request);

    Box agent_;
    PostCall post_;
    StatusCall status_;
};

// The type under which NIXL's binding knows its agents, for pybind11's conduit protocol. pybind11 looks a type up by the
// name in its std::type_info; that of nixlAgent itself is not exported.
const std::type_info *nixl_agent_type();

// What a binding must answer to for the pointer it hands out to mean the same here.
extern const char *const kPlatformAbi;

}  // namespace pd
