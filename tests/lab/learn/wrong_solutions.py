"""Wrong solutions of the lessons, each a small edit of a right one, and what it must be told."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WrongSolution:
    """A wrong solution.

    blanks : wrong texts by the number of the blank.
    edit : a text of the rest, and what takes its place.
    told : patterns that the message contains: the cause, and the audit's name where it has one.
    """

    name: str
    lesson: int
    told: tuple[str, ...]
    blanks: dict[int, str] = field(default_factory=dict)
    edit: tuple[str, str] = ("", "")

    def __str__(self):
        return f"{self.lesson}-{self.name}"


AVERAGE = "            average(model)  # new in lesson 3\n"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
LOSS = "cross_entropy(model(images), labels)"
WEIGHTS_IN_THE_LOOP = (
    "            for p in model.parameters():\n"
    "                dist.all_reduce(p.data)\n"
    "                p.data /= dist.get_world_size()\n"
)

# The first six are the ones that a single sentence used to answer.
LESSON_3 = [
    WrongSolution(
        "weights",
        3,
        ("the weights are averaged in place of the gradients", "weights-averaged"),
        {
            0: "dist.gather(parameter.data, arriving, dst=0)",
            2: "dist.scatter(parameter.data, means, src=0)",
        },
    ),
    WrongSolution(
        "copy",
        3,
        ("a copy gets it", "own-gradient"),
        {2: "dist.scatter(parameter.grad.clone(), means, src=0)"},
    ),
    WrongSolution(
        "rank 0 left out",
        3,
        ("rank 0's own gradient is missing", "not-the-mean"),
        {1: "[sum(arriving[1:]) / size] * size"},
    ),
    WrongSolution(
        "counted twice",
        3,
        ("rank 0's gradient is counted twice", "not-the-mean"),
        {1: "[(sum(arriving) + arriving[0]) / size] * size"},
    ),
    WrongSolution(
        "rank 0's for all",
        3,
        ("every rank gets rank 0's gradient", "own-gradient"),
        {1: "[arriving[0]] * size"},
    ),
    WrongSolution(
        "only rank 0",
        3,
        ("the mean comes to rank 0 only", "own-gradient"),
        {2: "rank == 0 and parameter.grad.copy_(means[0])"},
    ),
    WrongSolution(
        "after the step",
        3,
        ("the ranks' weights differ, since the average comes after the step", "own-gradient"),
        edit=(AVERAGE + STEP, STEP + AVERAGE),
    ),
    WrongSolution("never", 3, ("never averages", "group-unused"), edit=(AVERAGE, "")),
    WrongSolution(
        "another function",
        3,
        ("never averages", "group-unused"),
        edit=("train(average_gradients)", "train(lambda model: None)"),
    ),
    WrongSolution(
        "before backward",
        3,
        ("never averages", "after loss.backward"),
        edit=(BACKWARD + AVERAGE, AVERAGE + BACKWARD),
    ),
    WrongSolution(
        "every other step",
        3,
        ("in step 2 .* own rank's gradient", "group-unused"),
        edit=(AVERAGE, "            len(losses) % 2 or average(model)\n"),
    ),
    WrongSolution(
        "weights in the loop",
        3,
        ("the weights are averaged in place of the gradients", "weights-averaged"),
        edit=(AVERAGE + STEP, STEP + WEIGHTS_IN_THE_LOOP),
    ),
    WrongSolution("sum", 3, ("never divided", "sum-not-mean"), {1: "[sum(arriving)] * size"}),
    WrongSolution(
        "divided twice",
        3,
        ("divided by 3 twice", "averaged-twice"),
        {1: "[sum(arriving) / size / size] * size"},
    ),
    WrongSolution(
        "literal 2",
        3,
        ("divided by 2, not by", "1.500 times the mean on 3 ranks", "literal-divisor"),
        {1: "[sum(arriving) / 2] * size"},
    ),
    WrongSolution(
        "no mean",
        3,
        ("each rank gets one rank's gradient", "not-the-mean"),
        {1: "arriving[::-1]"},
    ),
    WrongSolution("nothing comes back", 3, ("nothing brings it back",), {2: "pass"}),
    WrongSolution(
        "last left out",
        3,
        ("left out: 1.bias:", "some-parameters"),
        edit=("model.parameters()", "list(model.parameters())[:-1]"),
    ),
    WrongSolution(
        "biases left out",
        3,
        ("left out: 0.bias and 1.bias:", "some-parameters"),
        edit=("if parameter.grad is None", "if parameter.grad is None or parameter.dim() < 2"),
    ),
    WrongSolution("gone", 3, ("a gradient that is None",), {2: "parameter.grad = None"}),
    WrongSolution(
        "other weights",
        3,
        ("start from different weights", "different-start"),
        edit=("torch.manual_seed(0)", "torch.manual_seed(dist.get_rank())"),
    ),
    WrongSolution(
        "same samples",
        3,
        ("train on the same samples", "same-samples"),
        edit=("rank=rank, seed=0", "rank=0, seed=0"),
    ),
    WrongSolution(
        "one order",
        3,
        ("same order", "same-order"),
        edit=("        loader.sampler.set_epoch(epoch)\n", ""),
    ),
    WrongSolution(
        "batch",
        3,
        ("192 samples in all, not 64", "wrong-global-batch"),
        edit=("GLOBAL_BATCH // size, sampler", "GLOBAL_BATCH, sampler"),
    ),
    WrongSolution(
        "no zero_grad",
        3,
        ("several steps add up",),
        edit=("            optimizer.zero_grad()\n", ""),
    ),
    WrongSolution("no step", 3, ("weights never change",), edit=(STEP, "")),
    WrongSolution(
        "scaled loss",
        3,
        ("the loss is divided by", "scaled-in-loss"),
        edit=(LOSS, f"{LOSS} / dist.get_world_size()"),
    ),
    WrongSolution(
        "learning rates",
        3,
        ("the ranks' weights differ: after step 1", "weights-diverge"),
        edit=("lr=LEARNING_RATE", "lr=LEARNING_RATE * (1 + dist.get_rank())"),
    ),
    WrongSolution(
        "another model",
        3,
        ("other parameters than those of the model",),
        edit=("SGD(model.parameters()", "SGD(build_model().parameters()"),
    ),
    WrongSolution(
        "not joined",
        3,
        ("never calls init_process_group",),
        edit=('    dist.init_process_group("gloo")\n', ""),
    ),
    WrongSolution(
        "a name",
        3,
        (
            r"average_gradients\(a Sequential\) fails in line \d+ of \S+ \(means = ",
            "NameError: .*'ariving'",
        ),
        {1: "[sum(ariving) / size] * size"},
    ),
    WrongSolution(
        "a name at the end",
        3,
        (r"the program fails in line \d+ of \S+ \(print.*NameError: .*'loss'",),
        edit=("loss {losses[0]", "loss {loss[0]"),
    ),
]

OTHERS = [
    WrongSolution("no zero_grad", 1, ("begins with forward, backward, step",), {1: "pass"}),
    WrongSolution(
        "no step", 1, ("begins with forward, zero_grad, backward, forward",), {3: "pass"}
    ),
    WrongSolution("no difference", 1, ("section forward takes ",), {0: "time.perf_counter()"}),
    WrongSolution(
        "step in backward",
        1,
        ("section backward takes 1110 s",),
        {2: "loss.backward(), optimizer.step()", 3: "pass"},
    ),
    WrongSolution(
        "another model",
        1,
        ("other parameters than those of the model",),
        edit=("SGD(model.parameters()", "SGD(build_model().parameters()"),
    ),
    WrongSolution(
        "twice the loss", 1, ("backward computes 2.000 times",), {2: "(2 * loss).backward()"}
    ),
    WrongSolution(
        "a name", 1, (r"train\(1\) fails in line \d+ of \S+ \(los", "'los'"), {2: "los.backward()"}
    ),
    WrongSolution(
        "other weights",
        2,
        ("start from different weights", "different-start"),
        {0: "dist.get_rank()"},
    ),
    WrongSolution(
        "rank 0's share",
        2,
        ("1797 samples in an epoch, 599 different ones of 1797", "same-samples"),
        {2: "0"},
    ),
    WrongSolution(
        "all samples", 2, ("take 5391 samples in an epoch", "same-samples"), {1: "1", 2: "0"}
    ),
    WrongSolution(
        "batch",
        2,
        ("3 epochs take 30 steps on 3 ranks, but 87", "wrong-global-batch"),
        {3: "GLOBAL_BATCH"},
    ),
    WrongSolution("no epoch", 2, ("set_epoch", "same-order"), {4: "pass"}),
    WrongSolution(
        "epoch 0 forever", 2, ("set_epoch", "same-order"), {4: "loader.sampler.set_epoch(0)"}
    ),
    WrongSolution(
        "no sampler",
        2,
        ("train on the same samples", "same-samples"),
        {4: "pass"},
        edit=("sampler=sampler)  # all", "shuffle=False)  # all"),
    ),
    WrongSolution(
        "no zero_grad",
        2,
        ("several steps add up",),
        edit=("            optimizer.zero_grad()\n", ""),
    ),
    WrongSolution("no step", 2, ("weights never change",), edit=(STEP, "")),
    WrongSolution(
        "bytes",
        4,
        ("0.125 times what rank 0's link", "Bytes are taken for bits"),
        {0: "2 * (nodes - 1) * gradient_mb / 1000 / rate_gbit"},
    ),
    WrongSolution(
        "in alone",
        4,
        ("gives 0.8861 s, 0.5 times", "one direction"),
        {0: "(nodes - 1) * gradient_mb * 8 / 1000 / rate_gbit"},
    ),
    WrongSolution(
        "rank 0 to itself",
        4,
        ("1.33 times", "nothing to itself"),
        {0: "2 * nodes * gradient_mb * 8 / 1000 / rate_gbit"},
    ),
    WrongSolution("nothing", 4, (r"exchange_seconds\(4, 36.92, 1.0\) returns None",), {0: "None"}),
    WrongSolution(
        "a name",
        4,
        (r"exchange_seconds\(4, 36.92, 1.0\) fails in line \d+ of \S+ \(return .*NameError",),
        {0: "2 * (nodes - 1) * gradient * 8 / 1000 / rate_gbit"},
    ),
    WrongSolution("always rank's chunk", 5, ("the first loop",), {0: "rank"}),
    WrongSolution("adds to its own", 5, ("the first loop",), {1: "rank - step"}),
    WrongSolution(
        "passes on too early", 5, ("the second loop",), {2: "rank - step", 3: "rank - step - 1"}
    ),
    WrongSolution("wrong way", 5, ("the first loop",), {0: "rank + step", 1: "rank + step + 1"}),
    WrongSolution("sum", 5, ("never divided", "sum-not-mean"), edit=("flat /= size", "pass")),
    WrongSolution(
        "literal 2", 5, ("divided by 2", "literal-divisor"), edit=("flat /= size", "flat /= 2")
    ),
    WrongSolution(
        "copy",
        5,
        ("a copy gets it", "own-gradient"),
        edit=("gradient.copy_(mean.view_as(gradient))", "pass"),
    ),
    WrongSolution(
        "another function",
        5,
        ("never averages", "group-unused"),
        edit=('["train"](average_gradients)', '["train"](lambda model: None)'),
    ),
    WrongSolution(
        "never sent",
        6,
        (r"ready\(\d, a tensor of shape \(5,\)\) fails", "Something is None"),
        {0: "-1"},
    ),
    WrongSolution("not awaited", 6, ("before its sum has arrived",), {2: "pass"}),
    WrongSolution("literal 2", 6, ("divided by 2", "literal-divisor"), {3: "2"}),
    WrongSolution("counted as 0", 6, ("step 1 is right, and in step 2",), {4: "0"}),
    WrongSolution("counted as 1", 6, ("ready",), {4: "1"}),
    WrongSolution(
        "waits at once",
        6,
        ("sent 8, and 0 were under way",),
        {1: "dist.all_reduce(flat)", 2: "pass"},
    ),
    WrongSolution(
        "one less",
        7,
        ("not by one less",),
        {1: "sum((v - mean) ** 2 for v in values) / (len(values) - 1)"},
    ),
    WrongSolution(
        "a constant batch",
        7,
        (r"normalise\(\[2.0, 2.0\]\) fails in line \d+ .*ZeroDivisionError",),
        {2: "(value - mean) / variance**0.5"},
    ),
    WrongSolution(
        "after the root", 7, ("not to its root",), {2: "(value - mean) / (variance**0.5 + 1e-5)"}
    ),
    WrongSolution(
        "no root",
        7,
        ("the root of the variance, not by",),
        {2: "(value - mean) / (variance + 1e-5)"},
    ),
    WrongSolution("no numbers", 7, (r"normalise\(.*returns \[None",), {2: "print(value)"}),
    WrongSolution(
        "last shard alone", 7, (r"0.25 g3", "with \\+="), {3: "gradient.copy_(part / shards)"}
    ),
    WrongSolution("sum", 7, ("it is the sum, 4 times",), {3: "gradient += part"}),
    WrongSolution("literal 4", 7, ("1 shard .* 0.25 times",), {3: "gradient += part / 4"}),
    WrongSolution(
        "lost", 7, ("it is zero, nothing was added",), {3: "gradient = gradient + part / shards"}
    ),
    WrongSolution("not called", 8, ("called it 3 times", "Nothing calls step"), {0: "pass"}),
    WrongSolution("readings", 8, ("returns 40 values", "readings of the clock"), {1: "clock()"}),
    WrongSolution(
        "narrow",
        8,
        ("91.8 % hold", "numbers 16 and 27"),
        {2: "math.floor(n / 2 - 0.5 * n**0.5)"},
    ),
    WrongSolution("rounded up", 8, ("numbers 14 and 27",), {2: "math.ceil(n / 2 - 0.98 * n**0.5)"}),
    WrongSolution(
        "no number",
        8,
        (r"median_interval\(\[.*\) fails in line \d+ .*TypeError",),
        {2: "n / 2 - 0.98 * n**0.5"},
    ),
    WrongSolution(
        "always 1",
        10,
        ("find_culprit returns 1, and must 0",),
        {0: "1 if any(gave_up) else None"},
    ),
    WrongSolution(
        "who complains",
        10,
        ("find_culprit returns 1, and must 0",),
        {0: "gave_up.index(True) if any(gave_up) else None"},
    ),
    WrongSolution(
        "never none", 10, ("find_culprit returns 0, and must None",), {0: "gave_up.index(False)"}
    ),
    WrongSolution("half an hour", 10, ("limit is 1800 s",), {4: "1800"}),
]
