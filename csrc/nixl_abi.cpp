#include "nixl_abi.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace pd {

namespace {

constexpr int kSuccess = 0;     // nixl_capi_status_t
constexpr int kInProgress = 1;  // errors are negative

template <typename Call>
Call find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == nullptr) {
        throw std::runtime_error(std::string("libnixl_capi has no function ") + name);
    }
    return reinterpret_cast<Call>(found);
}

Posted of_code(int code) {
    return code == kSuccess ? Posted::done : code == kInProgress ? Posted::in_progress : Posted::failed;
}

// std::type_info can be made from a name by a class derived from it.
class NamedType : public std::type_info {
  public:
    explicit NamedType(const char *mangled) : std::type_info(mangled) {}
};

}  // namespace

NixlAbi::NixlAbi(const std::string &library, std::uintptr_t agent) : agent_{reinterpret_cast<void *>(agent)} {
    void *handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays loaded, as NIXL itself does
    if (handle == nullptr) {
        throw std::runtime_error(dlerror());
    }
    if (find<bool (*)()>(handle, "nixl_capi_is_stub")()) {
        throw std::runtime_error(library + " is a stub");
    }
    post_ = find<PostCall>(handle, "nixl_capi_post_xfer_req");
    status_ = find<StatusCall>(handle, "nixl_capi_get_xfer_status");
}

Posted NixlAbi::post(std::uintptr_t request) const {
    Box agent = agent_;
    Box box{reinterpret_cast<void *>(request)};
    return of_code(post_(&agent, &box, nullptr));
}

Posted NixlAbi::status(std::uintptr_t request) const {
    Box agent = agent_;
    Box box{reinterpret_cast<void *>(request)};
    return of_code(status_(&agent, &box));
}

const std::type_info *nixl_agent_type() {
    static const NamedType type("9nixlAgent");
    return &type;
}

// PYBIND11_PLATFORM_ABI_ID of pybind11 3 for this compiler and library.
#if defined(__GLIBCXX__) && _GLIBCXX_USE_CXX11_ABI && __GXX_ABI_VERSION >= 1002
const char *const kPlatformAbi = "system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1";
#else
const char *const kPlatformAbi = "unknown";
#endif

}  // namespace pd
