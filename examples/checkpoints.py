"""Checkpoints, written by orbax: the training state, the losses so far and the settings of the run."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run in `folder`, the newest two of them kept."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        # Saving is synchronous: the state's memory is donated to the next step.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def require_none(self) -> None:
        if self._manager.latest_step() is not None:
            raise ValueError(
                f"--checkpoint-dir={self._folder} holds checkpoints already: add --resume to go on from the "
                "newest, or name another folder"
            )

    def save(self, step: int, state: Any, settings: dict[str, Any], history: dict[str, Any]) -> None:
        """Save the run after `step` steps."""
        if self._manager.latest_step() == step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave({"settings": settings, "history": history}),
            ),
        )

    def restore(self, like: Any, settings: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint: its step, its state, structured and placed as `like`, and its history.

        Raises:
          ValueError: there is none, or it belongs to a run with other settings.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"--resume needs a checkpoint, and --checkpoint-dir={self._folder} holds none")
        run = self._run(step)
        for name, value in settings.items():
            saved = run["settings"].get(name)
            if saved != value:
                raise ValueError(
                    f"--resume: the checkpoint in {self._folder} was made with {name}={saved!r}, "
                    f"this run has {name}={value!r}"
                )
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
        return step, restored["state"], run["history"]

    def settings(self) -> dict[str, Any]:
        """The settings of the run that made the newest checkpoint.

        Raises:
          ValueError: there is none.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"--checkpoint-dir={self._folder} holds no checkpoint of train_gpt.py")
        return self._run(step)["settings"]

    def restore_parameters(self, like: Any) -> Any:
        """The newest checkpoint's parameters, structured as `like`, on the default device.

        The optimizer's state, twice as large, is not read.
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like)
        state = {"parameters": like}
        arguments = ocp.args.PyTreeRestore(
            state, restore_args=ocp.checkpoint_utils.construct_restore_args(state), partial_restore=True
        )
        restored = self._manager.restore(
            self._manager.latest_step(), args=ocp.args.Composite(state=arguments)
        )
        return restored["state"]["parameters"]

    def _run(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
