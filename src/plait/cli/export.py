"""`plait export`: a run's newest checkpoint as a Hugging Face directory."""

from plait.cli.common import Debug, Dtype, NewDirectory, Run, print_line, report_errors
from plait.train.saved_recipe import check_is_run


@report_errors
def export(
    run: Run,
    out: NewDirectory,
    dtype: Dtype = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Export a trained model for AutoModelForCausalLM and AutoTokenizer."""
    check_is_run(run)
    from plait.train.export import export as write
    from plait.train.run_dir import RunDir

    write(RunDir(run), out, dtype)
    print_line(out)
