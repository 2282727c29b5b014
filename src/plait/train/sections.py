"""The sections of a recipe that belong to the training job. Those of data are in `data/config.py`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from plait.data.config import MAX_COUNT, FilePath
from plait.plan.distillation import Distillation
from plait.plan.loss_scaling import LossScaling
from plait.plan.preference import PairLossName, Preference

# Those that update each parameter by itself. Rprop does, but it has no weight decay and adapts its own step
# sizes, so that two keys of the recipe would have no effect.
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "AdamW8bit", "Adamax", "LAMB", "Lion",
    "NAdam", "RAdam", "RMSprop", "SGD",
)  # fmt: skip
GROUP_OPTIMIZERS = (*OPTIMIZERS, "Muon")  # Muon only trains matrices, which no model consists of

MONTH_S = 30 * 86400.0

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
BoardName = Literal["tensorboard", "wandb"]
CallbackName = Annotated[str, Field(pattern=r"^[^\W\d][\w.]*:[^\W\d]\w*$")]  # module:Class


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """`[run]`: directory, length and intervals. Every `*_every` is in steps; 0 means never."""

    dir: FilePath
    steps: Positive = 0  # 0: from `epochs`, until the data is known
    epochs: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    batch: Positive  # sequences per step, over all ranks; or micro-batches of documents
    seed: int = Field(default=0, ge=0, lt=2**63)  # for initial weights, dropout and sample order
    log_every: Positive = 10
    evaluate_every: Count = 100  # also before the first step and after the last
    evaluate_batches: Positive = 8  # batches of validation sequences per evaluation
    checkpoint_every: Count = 100  # also after the last step, and when stopped by a signal
    # since the last save, by rank 0's clock; 0 means never
    checkpoint_minutes: float = Field(default=0.0, ge=0, le=MONTH_S / 60)
    keep_last: Positive = 2
    keep_every: Count = 0  # also keep checkpoints at multiples of this step
    keep_best: bool = False  # also keep the one with the lowest validation loss
    early_stopping: Count = 0  # evaluations without a lower validation loss that end the run; 0: off
    save_in_background: bool = False  # training waits for a copy in memory, not for the disk
    max_failed_saves: Positive = 3  # failed saves in a row that end the run; see checkpointing.py
    check_replicas_every: Count = 100  # compare replicated weights between ranks; also before each save
    check_stragglers_every: Count = 50  # compare the time of each rank's own work
    # Python's garbage collector, on all ranks at once; 0: when Python decides
    collect_garbage_every: Count = 50
    straggler_factor: float = Field(default=1.5, gt=1)  # slow: so many times the median of the other ranks
    # a spike is this many typical deviations above the median loss; 0: off
    spike_factor: float = Field(default=0.0, ge=0)
    spike_window: int = Field(
        default=100, ge=4, le=MAX_COUNT
    )  # steps of the typical loss; see loss_spikes.py
    spike_skip: Count = 100  # batches skipped after the spike, too
    max_spikes: Count = 3  # rollbacks before the run ends with an error
    max_skipped: Positive = 10  # steps in a row without a finite gradient that end the run; see trainer.py
    max_restarts: Count = 3  # how often in all a killed worker of parameter servers is started again
    timeout_s: float = Field(default=600.0, gt=0, le=MONTH_S)  # how long a rank waits for another rank
    # time without a step after which all ranks write their stacks and exit
    hang_s: float = Field(default=300.0, ge=0, le=MONTH_S)
    save_s: float = Field(default=60.0, gt=0, le=MONTH_S)  # from a stop signal until local ranks are killed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # how ranks communicate; on CPUs shared memory (host) or Gloo
    transport: Literal["auto", "host", "gloo", "nccl"] = "auto"
    offload_dir: FilePath | None = None  # for offload=disk: a folder on a local disk of each host
    report_to: tuple[BoardName, ...] = ("tensorboard",)  # boards that show the curves
    callbacks: tuple[CallbackName, ...] = ()  # classes whose methods run at the events of the run
    trace: FilePath | None = None  # file for a trace of the pipeline's actions in steps 3 to 5
    probe: bool = False  # before the first step, compare gradients with the one-process model's


class BatchRampConfig(Section):
    """`[batch_ramp]`: batches that grow to run.batch sequences, linearly in the tokens read."""

    start: Positive  # sequences in the first batches
    step: Positive  # sequences by which batches grow at a time
    tokens: Positive  # from the run's beginning until the batches are full: data.sequence for each sequence


class ModelConfig(Section):
    """`[model]`: either `config`, the keys of a Hugging Face configuration with its `model_type`, or
    `path`, a directory or JSON file that contains one. `pretrained` starts from the weights in `path`; a run
    saves the configuration next to that path, so that it needs `path` only until its first checkpoint; with
    an `[adapter]` always, as its checkpoints do not hold these weights.
    `generation` are the keys of a generation_config.json, for the export; by default those in `path`.
    `keep_zeros`: zeros of linear weights in blocks stay zero, as in a pruned model.
    `head`: the model predicts tokens, or a `reward` of a text.
    """

    config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None
    path: FilePath | None = None
    pretrained: bool = False
    head: Literal["tokens", "reward"] = "tokens"
    keep_zeros: bool = False
    tensor_plan: dict[str, str] | None = None  # how `tp` shards layers, on top of the model's own plan


class AdapterConfig(Section):
    """`[adapter]`: only a LoRA adapter is trained, on the frozen weights of the model. The keys are those of
    peft.LoraConfig; `path` is the folder of an adapter in PEFT's files to start from, which has them all.

    LoRA: Hu et al., 2021; rsLoRA: Kalajdzievski, 2023; DoRA: Liu et al., 2024. All linear layers by default,
    as in QLoRA (Dettmers et al., 2023), and not the two that PEFT chooses for most families.
    """

    path: FilePath | None = None
    r: Positive = 8
    lora_alpha: float = Field(default=8, gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] | str | None = "all-linear"
    target_parameters: tuple[str, ...] | None = None  # such as mlp.experts.down_proj: experts of three dims
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: str | None = None
    modules_to_save: tuple[str, ...] | None = None  # trained as copies, without an adapter
    ensure_weight_tying: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, Positive] = {}
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: bool | Literal["gaussian"] = True

    def lora_config(self) -> dict[str, Any]:
        """Return the arguments of peft.LoraConfig."""
        values = self.model_dump(mode="json", exclude={"path"})
        alpha = float(self.lora_alpha)
        return {key: of for key, of in values.items() if of is not None} | {
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha
        }


class ParamGroupConfig(Section):
    """`[[optimizer.groups]]`: options of the parameters whose names match a pattern, e.g. `*.bias`, or an
    optimizer of their own: `name` and `args`."""

    match: str = Field(min_length=1)
    name: str | None = None
    args: dict[str, Any] = {}
    lr: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)

    def options(self) -> dict[str, float]:
        return {name: value for name in ("lr", "weight_decay") if (value := getattr(self, name)) is not None}


class OptimizerConfig(Section):
    """`[optimizer]`: a class of torch.optim, or plait's AdamW8bit, LAMB or Lion; `args` are its other
    arguments.

    A parameter is in the first of `groups` that matches its name. The others have the options of this
    section, without weight decay for norms and biases.
    """

    name: str = "AdamW"
    lr: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    clip_value: float | None = Field(default=None, gt=0)
    router_bias_update: float | None = Field(default=None, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    z_loss: float = Field(default=0.0, ge=0, lt=1)
    router_z_loss: float | None = Field(default=None, gt=0)
    args: dict[str, Any] = {}
    groups: tuple[ParamGroupConfig, ...] = ()

    def torch_args(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, **self.args}


class ScheduleConfig(Section):
    """`[schedule]`: the learning rate schedule, one of transformers.get_scheduler's."""

    name: Literal[
        "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
        "warmup_stable_decay",
    ] = "cosine"  # fmt: skip
    warmup: Count = 0  # steps from 0 up to optimizer.lr
    min_lr_ratio: float = Field(default=0.0, ge=0, lt=1)  # the decay ends at this fraction of optimizer.lr
    cycles: Positive = 1
    power: float = Field(default=1.0, gt=0)
    timescale: Positive | None = None  # steps after which the rate has fallen by sqrt(2); None: warmup
    decay: Positive | None = None  # the last steps, in which the rate decays
    # required with `decay`: get_scheduler's default is a cosine, that of the papers is linear or 1-sqrt
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = None


class LossScaleConfig(Section):
    """`[loss_scale]`: loss scaling for fp16; the keys are those of plait.LossScaling."""

    initial: float = LossScaling.initial
    growth: float = LossScaling.growth
    backoff: float = LossScaling.backoff
    interval: int = LossScaling.interval
    hysteresis: int = LossScaling.hysteresis
    minimum: float = LossScaling.minimum
    dynamic: bool = LossScaling.dynamic

    def scaling(self) -> LossScaling:
        """Return the validated settings. Raises ConfigError."""
        return LossScaling(**self.model_dump())


class PreferenceConfig(Section):
    """`[preference]`: the loss of pairs; all keys but the last two are those of plait.Preference.

    reference        where log-probabilities by the model before training are from: a frozen `model`, in each
                     step; the same, `precomputed` before the first step; or this model with `adapters_off`
    reference_model  a folder of weights; None: model.path
    """

    loss: PairLossName = Preference.loss
    beta: float = Preference.beta
    label_smoothing: float = Preference.label_smoothing
    sft_weight: float | None = Preference.sft_weight
    good_weight: float = Preference.good_weight
    bad_weight: float = Preference.bad_weight
    reference: Literal["model", "precomputed", "adapters_off"] = "model"
    reference_model: FilePath | None = None

    def options(self) -> Preference:
        """Return the validated options. Raises ConfigError."""
        return Preference(**self.model_dump(exclude={"reference", "reference_model"}))


class DistillationConfig(Section):
    """`[distillation]`: a teacher, whose likeliest tokens are targets, too.

    teacher      a folder of weights of a model with the same tokenizer; other keys are those of
                 plait.Distillation
    """

    teacher: FilePath
    weight: float = Distillation.weight
    temperature: float = Distillation.temperature
    top_tokens: int = Distillation.top_tokens

    def options(self) -> Distillation:
        """Return the validated options. Raises ConfigError."""
        return Distillation(self.weight, self.temperature, self.top_tokens)


class SampleConfig(Section):
    """`[sample]`: text generated by the trained model at the end. With tokens=0 there is none."""

    prompt: str = ""
    tokens: Count = 0
    temperature: float = Field(default=0.8, ge=0)  # 0 takes the most likely token
    top_k: Positive = 50


class EvalConfig(Section):
    """`[eval]`: tasks that are scored after the last step; see train/tasks.py."""

    tasks: tuple[str, ...] = ()  # FORMAT=FILE or FORMAT=FILE,SHOTS
    shots: Count | None = None  # rows of SHOTS before each question; None: all
    every: Count = 0  # also every so many steps
