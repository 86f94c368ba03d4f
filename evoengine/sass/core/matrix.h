#pragma once

#include "machine.h"

namespace sass {

Execute prepare_group_product(Instruction&);  // HGMMA
Execute prepare_group_product_of_bytes(Instruction&);  // QGMMA

}  // namespace sass
