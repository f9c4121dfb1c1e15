// The Python module `vllm_pd_connector.kernels._native`. Its wrappers and documentation are in kernels/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bell.hpp"
#include "layer_words.hpp"
#include "nixl_abi.hpp"
#include "poller.hpp"
#ifdef PD_WITH_CUDA
#include "layer_signal.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

std::chrono::nanoseconds of_seconds(double seconds) {
    return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

// The C++ address inside an object of NIXL's binding; 0 when it does not speak pybind11's conduit protocol, or was built
// by a compiler whose objects mean something else.
std::uintptr_t agent_address(nb::handle agent) {
    if (!nb::hasattr(agent, "_pybind11_conduit_v1_")) {
        return 0;
    }
    const nb::capsule type(pd::nixl_agent_type(), typeid(std::type_info).name());
    const nb::object found = agent.attr("_pybind11_conduit_v1_")(
        nb::bytes(pd::kPlatformAbi), type, nb::bytes("raw_pointer_ephemeral"));
    return found.is_none() ? 0 : reinterpret_cast<std::uintptr_t>(nb::cast<nb::capsule>(found).data());
}

std::shared_ptr<pd::ArmedWrite> armed_write(std::shared_ptr<pd::LayerWords> words, std::vector<std::size_t> layers,
                                            std::uint64_t step, std::uintptr_t request, std::int64_t deadline_ns) {
    for (const auto layer : layers) {
        if (layer >= words->num_layers()) {
            throw nb::index_error("a layer is beyond the words");
        }
    }
    auto write = std::make_shared<pd::ArmedWrite>();
    write->words = std::move(words);
    write->layers = std::move(layers);
    write->step = step;
    write->request = request;
    write->deadline_ns = deadline_ns;
    return write;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::class_<pd::Bell>(m, "Bell")
        .def(nb::init<>())
        .def("ring", &pd::Bell::ring)
        .def("wait", [](pd::Bell &bell) { bell.wait(); }, ReleaseGil())
        .def("wait_for", [](pd::Bell &bell, double s) { return bell.wait_for(of_seconds(s)); }, "seconds"_a,
             ReleaseGil());

    nb::class_<pd::LayerWords>(m, "LayerWords")
        .def(nb::init<std::size_t>(), "num_layers"_a)
        .def(nb::init<std::uintptr_t, std::size_t>(), "address"_a, "num_layers"_a)
        .def("bump", &pd::LayerWords::bump, "step"_a, "layer"_a)
        .def("finish", &pd::LayerWords::finish, "step"_a)
        .def("is_ready", &pd::LayerWords::is_ready, "layer"_a, "step"_a)
        .def("bumped_ns", &pd::LayerWords::bumped_ns, "layer"_a);

    nb::class_<pd::NixlAbi>(m, "NixlAbi")
        .def(nb::init<const std::string &, std::uintptr_t>(), "library"_a, "agent"_a);
    m.def("agent_address", &agent_address, "agent"_a);

    nb::enum_<pd::State>(m, "State")
        .value("ARMED", pd::State::armed)
        .value("POSTED", pd::State::posted)
        .value("DONE", pd::State::done)
        .value("FAILED", pd::State::failed)
        .value("WITHDRAWN", pd::State::withdrawn);

    nb::class_<pd::ArmedWrite>(m, "ArmedWrite")
        .def_prop_ro("state", [](const pd::ArmedWrite &write) { return write.state.load(); })
        .def_prop_ro("ready_ns", [](const pd::ArmedWrite &write) { return write.ready_ns.load(); })
        .def_prop_ro("posted_ns", [](const pd::ArmedWrite &write) { return write.posted_ns.load(); });

    nb::class_<pd::Poller>(m, "Poller")
        .def("__init__",
             [](pd::Poller *self, std::shared_ptr<pd::Bell> bell, std::shared_ptr<pd::NixlAbi> abi, double nap_s,
                std::vector<int> cpus, std::uintptr_t select_device, std::uintptr_t device) {
                 pd::ThreadPlace place{std::move(cpus), reinterpret_cast<int (*)(void *)>(select_device),
                                       reinterpret_cast<void *>(device)};
                 nb::gil_scoped_release release;  // it waits for the thread, whose `select_device` may be Python
                 new (self) pd::Poller(std::move(bell), std::move(abi), of_seconds(nap_s), std::move(place));
             },
             "bell"_a, "abi"_a.none(), "nap_s"_a, "cpus"_a, "select_device"_a, "device"_a)
        .def_prop_ro("pin_error", &pd::Poller::pin_error)
        .def_prop_ro("device_error", &pd::Poller::device_error)
        .def("arm",
             [](pd::Poller &poller, std::shared_ptr<pd::LayerWords> words, std::vector<std::size_t> layers,
                std::uint64_t step, std::uintptr_t request, std::int64_t deadline_ns) {
                 auto write = armed_write(std::move(words), std::move(layers), step, request, deadline_ns);
                 nb::gil_scoped_release release;
                 poller.arm(write);
                 return write;
             },
             "words"_a, "layers"_a, "step"_a, "request"_a, "deadline_ns"_a)
        .def("disarm", &pd::Poller::disarm, "write"_a, ReleaseGil())
        .def("wake", &pd::Poller::wake)
        .def("close", &pd::Poller::close, ReleaseGil());

#ifdef PD_WITH_CUDA
    m.attr("has_cuda") = true;
    m.def("begin_step", &pd::begin_step, "stream"_a, "epoch"_a, "step"_a);
    m.def("signal_layer", &pd::signal_layer, "stream"_a, "epoch"_a, "word"_a);
    m.def("finish_step", &pd::finish_step, "stream"_a, "epoch"_a, "words"_a, "num_layers"_a, "unannounced"_a);
#else
    m.attr("has_cuda") = false;
#endif
}
