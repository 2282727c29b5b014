// The C sources of the host transport, tested without Python: `make sanitize` runs this under the sanitizers.
#include "check.h"

int main(void) {
    test_kernels();
    puts("native: passed");
    return 0;
}
