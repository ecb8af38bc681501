"""The probe: it watches a training script from within. Standard library and torch only.

``hook/sitecustomize.py`` loads this package when Python starts; ``install`` then patches torch when
the script imports it. The probe adds no collective, draws no random number and changes no tensor.
Each process writes what it sees to files of its own in the folder of the run, at once, so that
nothing is lost when the process is killed:

``<pid>.jsonl``
    One record a line: ``{"k": kind, "t": seconds of time.monotonic(), ...}``.
``<pid>.f64``
    Numbers in float64. A record refers to them with ``[offset, count]`` in numbers, not bytes.

Of each parameter the probe keeps the same 512 coordinates on every rank and in every step (all, if
there are fewer), see ``coordinates.py``. "Samples of the parameters" below are these numbers of
all parameters of an optimiser, in the order of its ``params`` records.

The kinds, with their fields ("at" is [file, line, text of the line] of the script, or null):

======== ==========================================================================================
start    ppid, python (version), executable (sys.executable), hint (the rank that the command
         was started for, or null), variables (RANK, LOCAL_RANK, WORLD_SIZE where set)
torch    version; torch has been imported
trouble  part (module of the probe), text (traceback): the probe itself failed in one place, and the
         script went on
searched the script looked through Python's memory, in which the probe's objects are: what (such as
         "gc.get_objects"), at
group    init_process_group: rank, world, at
ddp      DistributedDataParallel was built: bytes and numbers (of the parameters that it averages),
         ranks (of its group), at
missed   a backward through DistributedDataParallel gave other gradients than it averages; written
         where this changes: step, unused (names of its parameters that got none), late (of those
         that got one, and required none when it was built), converted (of those that a conversion
         of the module has cut off from its hooks), at (the line that converted a module
         last; null if none of these)
hook     DistributedDataParallel got a communication hook, whose calls are seen: name, at
fsdp     fully_shard or FSDP1: at
params   new parameters of optimiser o: optimizer (class), built (step at which the probe first saw
         the optimiser), at (the line that made it), model (the line that made the model), rows
         [[key, name, shape, dtype, numel, serial]]: key is "o.group.index", serial is the tensor's
         own, whichever optimiser holds it. Sharded parameters (FSDP2) are left out
weights  at the first backward after ``step`` steps of optimiser o: o, step, values (samples)
backward step (as Probe.step counts), micro (number of this backward in the step, from 0), forwards
         [[samples, input_hash, through ("ddp", "module" or "bypass": a module that DDP has wrapped,
         but not through DDP), mode ("train", "eval", or "both" if the parts of the model differ),
         dtypes (of what its modules returned)]], one if model.forward() is called directly, loss
         {node, reduction,
         arriving, samples, target_hash, value} or null (arriving: the gradient that reaches the
         loss node, added up; 0 without one; value: of the tensor from which the pass began;
         counted: of how many targets a classification's mean is, without those of ignore_index),
         synced (whether DDP was to average after its latest forward; null without DDP), seconds,
         exposed_seconds (from this rank's last gradient to the end of backward), optimizers (the
         numbers of those whose parameters got a gradient), at
step     an update of an optimiser: o, step (from 0), optimizer, micro (backwards since the last
         step), own (samples: this rank's own gradients, added up since .grad was last cleared; 0
         where none arrived, NaN where nobody knows), got (samples of what the optimiser gets, right
         before the update), unclipped (the same before it was clipped; left out if it was not),
         own_norm and got_norm (over all parameters, in full; own_norm is null
         with several backwards), lr [per group], settings {name: value of the first group}, scale
         (of GradScaler, or 1), clips [[kind "norm" or "value", limit, total norm or null,
         collectives before it in this step, at, unscaled (GradScaler.unscale_ has run)]], kept (of
         how many parameters .grad still held, at the step's first backward, what the update before
         had used), at
stepped  follows it at once: o, step, seconds (of the update), state (hash of samples of the
         optimiser's state; null if it has none)
unapplied at the end, of a model that an optimiser trains: names (of the parameters that got
         gradients, lie in no optimiser that took a step, and did not change), steps (that left a
         gradient unused, of those sampled), numbers (that these have), every (that all have), at
         (the line that made them)
loader   l (its number), dataset, length, batches, sampler, replicas, inner_length (of the innermost
         datasets; null where the indices within are not known), content (hash of samples that these
         hold, or null), at (a line that iterates over it), made (the line that made it)
batch    given to the script: l, epoch (iterations over l so far, from 0), b, indices (of the
         sampler), inner (the same as indices of the innermost dataset; null if no dataset lies
         within, or its indices are not known; those of the n-th innermost dataset of a
         ConcatDataset begin at n * 2**40), contents (hash of each sample's row of the batch, or
         null)
rest     l, epoch, indices: what the script would still have been given after the cut, inner; there
         is none if that is endless
trained  a backward or an update followed a batch of this iteration over l: l, epoch (once for each)
epoch    an iteration over l ended: l, epoch, batches, cut
join     the script entered torch.distributed's Join: at
call     a collective began: c, name, op, size (of its group), group (null for all ranks, else its
         [name, ranks]; of new_group [null, ranks of the new one]), bytes (that this rank gives, or
         gets if it gives none), dtype and shape (of the first tensor), step, peer (src, dst or
         null), async, content ("gradient", "weights" or "other"), parameter (the serial of the
         first one of a gradient, or null), within ("forward" if a model's
         that trains is under way, "backward" or null), world (the number of ranks that
         init_process_group waits for, or null), meets (where it meets them: "address:port" or its
         init_method; null for a store of the script), at. init_process_group and new_group are
         calls as well. Of few other numbers that are summed over all ranks also tensor (its number)
         and values (those of this rank)
done     c, seconds (until the call returned), own_thread (it was called in a thread of the script's
         own), error (null unless it failed); a second record after an asynchronous call's
         Work.wait, with seconds 0 and wait_seconds
mesh     a DeviceMesh was built, so some communication may not be seen: at
eval     first forward without gradients after ``step`` steps: step, buffers [[name, samples as a
         list]], batchnorm (number of BatchNorm layers), mode and dtypes (as of backward), drew (it
         drew random numbers), at
autocast the script has left autocast, switched on while gradients are: dtype, model (whether one
         ran within it), at; once for each line
drew     a batch was made with random numbers, in this process: indices (of the sampler), states
         {generator: hash of its state before} of those that it drew from
load     Module.load_state_dict has succeeded: step, matched, missing and unexpected (numbers of
         keys), names (the first that is missing, and the first unexpected one), at
saved    torch.save to a file: step, path, holds (what kinds of content), at
loaded   torch.load from a file: step, path, at
random   a training forward that draws, as by dropout: step, hash (of the generators' states
         before it), at
stands   this process has waited for 3 s in a function that communicates, and done nothing else: c
         and name of the call (null if it waits elsewhere, such as in DDP's backward), at; written
         once for each wait, so a rank still waits if this is its last record but ``stack``
stack    the main thread's at; written once the runner has made the file "dump" in the folder
clock    only with clocks, see clocks.py
cut      step, replaced (names of the functions that the probe has put into torch and other code
         has replaced since)
error    type, message, at, after_cut
end      the process ends in good order: status (null unless by os._exit, by which forked ones
         end), after_cut
======== ==========================================================================================
"""

from .state import ENVIRONMENT, install

__all__ = ["ENVIRONMENT", "install"]
