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

# Lesson 7's second step: blanks 4 to 9 are forward's, 10 to 15 backward's.
ONES = "torch.ones_like(x)"
BATCHNORM = [
    WrongSolution("no message", 7, ("count", "own sums", "No rank sends"), {5: "pass"}),
    WrongSolution(
        "a copy is sent",
        7,
        ("count", "own sums", "use `sums`"),
        {5: "dist.all_reduce(sums.clone())"},
    ),
    WrongSolution("summed on rank 0", 7, ("rank [12]'s count",), {5: "dist.reduce(sums, 0)"}),
    WrongSolution(
        "sent twice",
        7,
        ("add up their sums twice",),
        {5: "dist.all_reduce(sums), dist.all_reduce(sums)"},
    ),
    WrongSolution(
        "averaged",
        7,
        ("mean of the ranks' counts",),
        {5: "dist.all_reduce(sums, dist.ReduceOp.AVG)"},
    ),
    WrongSolution("equal counts", 7, ("count.*unequal",), {6: "len(x) * dist.get_world_size()"}),
    WrongSolution("ranks", 7, ("number of ranks, not of values",), {6: "dist.get_world_size()"}),
    WrongSolution(
        "mean of means",
        7,
        (r"rank 0's mean\[", "mean of the ranks' means"),
        {
            4: f"torch.stack([{ONES}.sum(0), x.mean(0), (x**2).mean(0)])",
            7: "sums[1] / dist.get_world_size()",
        },
    ),
    WrongSolution("sum of means", 7, ("sum",), {7: "sums[1]"}),
    WrongSolution("mean by own count", 7, ("this rank's own count",), {7: "sums[1] / len(x)"}),
    WrongSolution("own mean", 7, (r"rank 0's mean\[", "own sums alone"), {7: "x.mean(0)"}),
    WrongSolution(
        "mean of variances",
        7,
        (r"rank 0's variance\[", "mean of the ranks' variances, each", r"x\*\*2"),
        {
            4: f"torch.stack([{ONES}.sum(0), x.sum(0), x.var(0, correction=0)])",
            8: "sums[2] / dist.get_world_size()",
        },
    ),
    WrongSolution(
        "mean of torch's variances",
        7,
        ("mean of the ranks' variances, divided by one less",),
        {
            4: f"torch.stack([{ONES}.sum(0), x.sum(0), x.var(0)])",
            8: "sums[2] / dist.get_world_size()",
        },
    ),
    WrongSolution(
        "weighted mean of variances",
        7,
        ("weighted by count",),
        {
            4: f"torch.stack([{ONES}.sum(0), x.sum(0), len(x) * x.var(0, correction=0)])",
            8: "sums[2] / count",
        },
    ),
    WrongSolution("own variance", 7, ("own sums alone",), {8: "x.var(0, correction=0)"}),
    WrongSolution("no mean subtracted", 7, (r"subtract mean\*\*2",), {8: "sums[2] / count"}),
    WrongSolution(
        "mean subtracted", 7, (r"subtract mean\*\*2, not",), {8: "sums[2] / count - mean"}
    ),
    WrongSolution(
        "deviation", 7, ("standard deviation",), {8: "(sums[2] / count - mean**2) ** 0.5"}
    ),
    WrongSolution("variance by own count", 7, ("own count",), {8: "sums[2] / len(x) - mean**2"}),
    WrongSolution(
        "one less in both",
        7,
        (r"rank 0's variance\[", "one less than the number"),
        {8: "(sums[2] / count - mean**2) * count / (count - 1)", 9: "variance"},
    ),
    WrongSolution(
        "float32",
        7,
        ("around 1,000 in float32", r"x\.double\(\)"),
        {4: f"torch.stack([{ONES}, x, x**2]).sum(1)"},
    ),
    WrongSolution(
        "doubled too late",
        7,
        ("around 1,000 in float32", r"x\.double\(\)"),
        {4: f"torch.stack([{ONES}, x, x**2]).double().sum(1)"},
    ),
    WrongSolution(
        "N in the running variance",
        7,
        (r"rank 0's running_variance\[", "one less"),
        {9: "variance"},
    ),
    WrongSolution(
        "own N in the running variance",
        7,
        ("running_variance", "this rank's own"),
        {9: "variance * len(x) / (len(x) - 1)"},
    ),
    WrongSolution(
        "squares alone by one less",
        7,
        (r"running_variance.*the mean of x\*\*2 alone",),
        {9: "sums[2] / (count - 1) - mean**2"},
    ),
    WrongSolution(
        "means of g",
        7,
        ("the ranks send means, not sums",),
        {
            13: "torch.stack([grad_bias, grad_weight]) / len(x)",
            15: "weight / std * (g - (sums[0] + z * sums[1]) / dist.get_world_size())",
        },
    ),
    WrongSolution("a number", 7, ("returns 1.5 as mean", r"shape \(2,\)"), {7: "1.5"}),
    WrongSolution("one sum", 7, ("fails in line", "IndexError"), {4: "x.sum(0)[:1]"}),
    WrongSolution(
        "own z",
        7,
        (r"rank 0's grad_x\[", "z is made with this rank's own mean$"),
        {10: "(x - x.mean(0)) / std"},
    ),
    WrongSolution(
        "own z and deviation",
        7,
        ("own mean and deviation",),
        {10: "(x - x.mean(0)) / (x.var(0, correction=0) + 1e-5) ** 0.5"},
    ),
    WrongSolution(
        "no message in backward", 7, ("grad_x", "own sums", "No rank sends"), {14: "pass"}
    ),
    WrongSolution(
        "sent twice in backward",
        7,
        ("grad_x", "add up their sums twice"),
        {14: "dist.all_reduce(sums), dist.all_reduce(sums)"},
    ),
    WrongSolution(
        "no second term",
        7,
        (r"- z \* sum\(g \* z\) / count is missing: each x moves the deviation",),
        {15: "weight / std * (g - sums[0] / count)"},
    ),
    WrongSolution(
        "no first term",
        7,
        (r"- sum\(g\) / count is missing: each x moves the mean",),
        {15: "weight / std * (g - z * sums[1] / count)"},
    ),
    WrongSolution(
        "neither term",
        7,
        ("moves the mean.*; .*moves the deviation",),
        {15: "weight / std * g"},
    ),
    WrongSolution(
        "own count in backward",
        7,
        ("divided by this rank's own count",),
        {15: "weight / std * (g - sums[0] / len(x) - z * sums[1] / len(x))"},
    ),
    WrongSolution(
        "no count",
        7,
        ("not divided by `count`",),
        {15: "weight / std * (g - sums[0] - z * sums[1])"},
    ),
    WrongSolution(
        "added",
        7,
        (r"sum\(g\) / count is added.*; z \* .* is added",),
        {15: "weight / std * (g + sums[0] / count + z * sums[1] / count)"},
    ),
    WrongSolution(
        "no z",
        7,
        ("not multiplied by z",),
        {15: "weight / std * (g - (sums[0] + sums[1]) / count)"},
    ),
    WrongSolution(
        "no weight",
        7,
        ("weight is missing",),
        {15: "(g - sums[0] / count - z * sums[1] / count) / std"},
    ),
    WrongSolution(
        "variance for std",
        7,
        ("by the variance, not by std",),
        {15: "weight / variance * (g - sums[0] / count - z * sums[1] / count)"},
    ),
    WrongSolution(
        "all ranks' gradients",
        7,
        (r"rank 0's grad_weight\[", "sum over all ranks, and would count 3 times"),
        {14: "dist.all_reduce(sums); grad_bias, grad_weight = sums"},
    ),
    WrongSolution(
        "sent in place",
        7,
        (r"rank 0's grad_weight\[", "sum over all ranks.*from before the message"),
        {13: "grad_bias, grad_weight", 14: "dist.all_reduce(sums[0]), dist.all_reduce(sums[1])"},
    ),
    WrongSolution(
        "bias alone",
        7,
        (r"rank 0's grad_bias\[", "sum over all ranks, and would count 3 times"),
        {14: "dist.all_reduce(sums); grad_bias = sums[0]"},
    ),
    WrongSolution(
        "swapped",
        7,
        (r"rank 0's grad_weight\[", "it is grad_bias"),
        {11: "g.sum(0)", 12: "(g * z).sum(0)", 13: "torch.stack([grad_weight, grad_bias])"},
    ),
    WrongSolution(
        "gradient of z",
        7,
        ("grad_weight", r"take the sum of g \* z"),
        {11: "(g * x).sum(0)", 13: "torch.stack([grad_bias, (g * z).sum(0)])"},
    ),
]
