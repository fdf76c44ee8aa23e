// The kernels for any machine.
#include "linear_vector_generic.h"
//
#include "linear_table.h"

namespace pyserve {

const LinearKernels kGenericKernels = make_linear_kernels<Generic>("generic");

}  // namespace pyserve
