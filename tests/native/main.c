// The C sources of the host transport, tested without Python: `make sanitize` runs this under the sanitizers.
// With names of parts it runs those only.
#include "check.h"

#include <string.h>

static const struct {
    const char *name;
    void (*run)(void);
} parts[] = {{"processes", test_processes}, {"kernels", test_kernels}, {"group", test_group}, // forks come first
             {"helper", test_helper},       {"sums", test_sums},       {"messages", test_messages}};

int main(int num_names, char **names) {
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        int wanted = num_names < 2;
        for (int k = 1; k < num_names; k++) wanted |= !strcmp(names[k], parts[i].name);
        if (wanted) parts[i].run();
    }
    puts("native: passed");
    return 0;
}
