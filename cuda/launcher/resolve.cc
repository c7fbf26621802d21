#include "resolve.h"

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

namespace jax_flash {

namespace py = pybind11;

std::shared_ptr<Plan> Resolve(std::string_view text) {
    py::gil_scoped_acquire gil;
    try {
        return py::module_::import("jax_flash.cuda.call")
            .attr("resolve")(py::str(text.data(), text.size()))
            .cast<std::shared_ptr<Plan>>();
    } catch (py::error_already_set& error) {
        // Copy the message out while the GIL is held; the exception itself holds Python objects.
        if (error.matches(PyExc_ValueError)) throw std::invalid_argument(py::str(error.value()));
        throw std::runtime_error(error.what());
    }
}

}  // namespace jax_flash
