"""The lab's async side: the model's own coroutines, and the verbs for exploring."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chatspace_lab.analysis.dose import scale_for_dose
from chatspace_lab.chat import ChatResponse, check_conversation
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.errors import RequestError, SessionError
from chatspace_lab.session import store
from chatspace_lab.session.build import build
from chatspace_lab.session.collect import Collection, asked, one_sample
from chatspace_lab.session.history import History
from chatspace_lab.session.job import CURRENT
from chatspace_lab.session.pooled import PooledActivations
from chatspace_lab.session.sweep import Grid, as_layers, frame_of, lay_out, vector_at
from chatspace_lab.steering.names import directions_named, spec_named, vector_named
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, Operation, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.where import Where

if TYPE_CHECKING:
    import pandas as pd

    from chatspace_lab.analysis.direction import Direction


class AsyncLab:
    """What :class:`LabSession` does, for use with ``await``.

    Every public method and attribute of the model is here too, under its own name: ``await lab.aio.generate(…)``.

    Attributes
    ----------
    model : VLLMSteerModel
        The engine.
    history : History
        Every request since the lab was made.
    norms : dict of int to float
        Mean residual norm per layer on the prompt that was measured last (:meth:`measure`, :meth:`sweep`).
    measured_on : str or None
        That prompt.
    vectors : dict of str to vector
        Named vectors and directions. Wherever a vector is taken, its name in here will do: ``lab.steer(16, "joy")``,
        ``AddSpec("joy", 4.0)``, ``directions=["joy"]``.
    """

    def __init__(self, model: VLLMSteerModel) -> None:
        self.model = model
        self.history = History()
        self.norms: dict[int, float] = {}
        self.measured_on: str | None = None
        model.observe(self.history)

    @property
    def vectors(self) -> dict[str, Any]:
        """Named vectors and directions."""
        return self.model.vectors

    @vectors.setter
    def vectors(self, vectors: Mapping[str, Any]) -> None:
        self.model.vectors = dict(vectors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self.model) if not name.startswith("_"))})

    # -- steering ----------------------------------------------------------------------------------------------------

    async def steer(
        self, layers: int | Sequence[int], vector: Any, scale: float | None = None, *, dose: float | None = None
    ) -> None:
        """Add a vector at one or several layers from now on, in place of what was added there before.

        Parameters
        ----------
        layers
            Changed all at once.
        vector
            ``[hidden_size]``, or one per layer: ``{layer: vector}``, or a direction of the analysis; or the name of one
            in :attr:`vectors`.
        scale
            Factor on the vector's own length; 1 if neither is given.
        dose
            In place of ``scale``: the added norm as a fraction of the mean residual norm at that layer, on the prompt
            that was measured last.

        Raises
        ------
        SteeringError, RequestError, SessionError
        """
        if scale is not None and dose is not None:
            raise RequestError("steer: give scale or dose, not both")
        chosen = as_layers(layers, self.model.layer_count, "steer")
        vector = vector_named(vector, self.vectors, "steer")
        operations: dict[int, Operation] = {}
        for layer in chosen:
            here = vector_at(vector, layer, self.model.hidden_size, "steer")
            if dose is None:
                operations[layer] = AddSpec(here, 1.0 if scale is None else scale)
            elif not self.norms:
                raise SessionError(
                    "steer: a dose needs the residual's norm: lab.measure(prompt) first, or give a scale"
                )
            else:
                operations[layer] = AddSpec(here, scale_for_dose(dose, here, layer, self.norms))
        await self._set(operations)

    async def cap(
        self,
        layers: int | Sequence[int],
        vector: Any,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
    ) -> None:
        """Clamp the component along a vector to ``[min, max]`` at one or several layers from now on."""
        chosen = as_layers(layers, self.model.layer_count, "cap")
        await self._set({at: ProjectionCapSpec(self._vector(vector, at, "cap"), min, max) for at in chosen})

    async def ablate(self, layers: int | Sequence[int], vector: Any, scale: float = 0.0) -> None:
        """Multiply the component along a vector by ``scale`` at one or several layers from now on."""
        chosen = as_layers(layers, self.model.layer_count, "ablate")
        await self._set({at: AblationSpec(self._vector(vector, at, "ablate"), scale) for at in chosen})

    async def clear(self, layers: int | Sequence[int] | None = None) -> None:
        """Remove all session-wide steering at some layers; at all with None."""
        if layers is None:
            await self.model.clear_all_vectors()
            return
        chosen = as_layers(layers, self.model.layer_count, "clear")

        def without(spec: SteeringSpec) -> SteeringSpec:
            for layer in chosen:
                spec = spec.with_layer(layer, None)
            return spec

        await self.model.update_steering_spec(without)

    def _vector(self, vector: Any, layer: int, what: str) -> Any:
        return vector_at(vector_named(vector, self.vectors, what), layer, self.model.hidden_size, what)

    async def _set(self, operations: Mapping[int, Operation]) -> None:
        def update(spec: SteeringSpec) -> SteeringSpec:
            for layer, operation in operations.items():
                here = spec.layers.get(layer)
                alone = SteeringSpec.at(layer, operation).layers[layer]
                spec = spec.with_layer(layer, here.with_operation(operation) if here else alone)
            return spec

        await self.model.update_steering_spec(update)

    # -- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, text: str, *, system: str | None = None, **options: Any) -> ChatResponse:
        """Answer one user message; ``options`` as for ``chat``, without captures and raw output."""
        for name in ("capture_layers", "raw_output"):
            if options.get(name):
                raise RequestError(f"ask: {name} is an argument of chat")
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        answers = await self.model.chat(messages, **options)
        found: ChatResponse = answers[0]
        return found

    async def measure(self, prompt: Any, *, chat_options: dict[str, Any] | None = None) -> pd.DataFrame:
        """Measure the residual stream's norm on a prompt, unsteered; doses are relative to it from now on.

        Parameters
        ----------
        prompt
            Text, token ids, or a conversation.

        Returns
        -------
        pandas.DataFrame
            ``layer`` and ``norm``: the mean over the prompt's tokens, without the first, which collects attention and
            is many times longer than the others.
        """
        await self._measure(self._prepare(prompt, chat_options, max_tokens=1), asked(prompt))
        import pandas as pd

        return pd.DataFrame({"layer": list(self.norms), "norm": list(self.norms.values())})

    def _prepare(self, prompt: Any, chat_options: dict[str, Any] | None, **sampling: Any) -> Any:
        chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
        if chat:
            check_conversation(prompt)
        found = self.model.prepare(prompt, chat=chat, chat_options=chat_options, **sampling)
        if len(found) != 1:
            raise RequestError(f"expected one prompt or one conversation, got {len(found)}")
        return found[0]

    async def _measure(self, prompt: Any, name: str) -> None:
        ids = prompt.token_ids
        where = Where.span(1, len(ids)) if len(ids) > 1 else Where("prompt")
        _, [handle] = await self.model.generate(
            prompt,
            temperature=0.0,
            max_tokens=1,
            steering=SteeringSpec.none(),
            capture_layers=range(self.model.layer_count),
            capture_where=where,
        )
        async with handle:
            readings = await handle.read()
        self.norms = dict(zip(readings.layers, map(float, readings.norm.mean(axis=1)), strict=True))
        self.measured_on = name

    async def sweep(
        self,
        prompt: Any,
        layers: int | Sequence[int],
        vector: Any,
        scales: Iterable[float] | None = None,
        *,
        doses: Iterable[float] | None = None,
        operation: str = "add",
        read_layer: int | None = None,
        perplexity: bool = True,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 48,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> pd.DataFrame:
        """Run every layer with every scale as one batch, each request steered by itself.

        The session-wide steering is left out. Interrupted, ``lab.partial`` has the finished part.

        Parameters
        ----------
        prompt
            Text, token ids, or a conversation.
        layers, scales
            The grid, layer by layer.
        vector
            ``[hidden_size]``, or one per layer, or a name in :attr:`vectors`.
        doses
            In place of ``scales``: the added norm over the mean residual norm at that layer on this prompt.
        operation
            ``"add"``, or ``"ablate"`` (then a scale multiplies the component).
        read_layer
            Layer at which the projection is read; None is the steered layer.
        perplexity
            Whether to score each answer by the unsteered model, a prefill each.
        max_tokens, temperature, sampling
            As for ``generate``.

        Returns
        -------
        pandas.DataFrame
            ``layer``, ``scale``, ``dose`` (added norm over the mean residual norm at that layer on this prompt),
            ``text``, ``projection`` (mean over the answer's tokens of x·u, u the vector's direction), ``perplexity``
            (of the answer under the unsteered model), ``repetition`` (share of repeated 3-grams), ``tokens`` and
            ``finish_reason``. ``frame.attrs["norms"]`` has the residual norms.
        """
        one_sample("sweep", sampling)
        vector = vector_named(vector, self.vectors, "sweep")
        plan = lay_out(self.model, layers, vector, scales, operation, doses)
        if read_layer is not None:
            read_layer = check_layer(read_layer, self.model.layer_count)
        sampling = {"max_tokens": max_tokens, "temperature": temperature, **sampling}
        prepared = self._prepare(prompt, chat_options, **sampling)
        job = CURRENT.get()
        if job is not None:
            job.expect(1 + len(plan) * (2 if perplexity else 1))
            job.partial = lambda: frame_of([], planned=len(plan))
        await self._measure(prepared, asked(prompt))
        cells = [cell.scaled(self.norms[cell.layer]) for cell in plan] if doses is not None else plan
        grid = Grid(
            self.model,
            prepared,
            cells,
            operation=operation,
            read_layer=read_layer,
            norms=self.norms,
            perplexity=perplexity,
            sampling=sampling,
        )
        if job is not None:
            job.partial = grid.frame
        return await grid.run()

    async def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: str = "last",
        *,
        directions: Mapping[str, Any] | Sequence[str] | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> PooledActivations | pd.DataFrame:
        """Run many prompts and keep of each only a reduction of its activations, made where they are.

        Interrupted, ``lab.partial`` has the finished part.

        Parameters
        ----------
        prompts
            Prompts, or conversations; thousands are fine.
        layers
            To capture.
        reduce
            ``"last"``: the last chosen token. ``"mean"``: the mean over the chosen tokens. ``"norm"``: each token's
            norm. ``"projection"``: and its projections on ``directions``.
        directions
            ``{name: vector}``, or names in :attr:`vectors`, with ``"projection"``.
        where
            Which tokens: ``"prompt"``, ``"answer"``, ``"all"``, ``Where.messages(…)``, ``Where.span(…)``. For a mean
            over whole prompts take ``Where("prompt").without_first_token()``: the first token's activation is often a
            hundred times longer than all others, and would be all that the mean shows.
        steering
            For all of them. None is no steering, whatever is in force: what is built or measured from activations is
            about the model itself. ``"session"`` is the session-wide steering in force now.
        max_tokens, temperature, sampling
            As for ``generate``. An answer of n tokens has n − 1 rows.

        Returns
        -------
        PooledActivations
            With ``"last"`` and ``"mean"``: ``[prompts, layers, hidden_size]`` float32 with labels, and ``steering``.
        pandas.DataFrame
            With ``"norm"`` and ``"projection"``: a row per prompt, layer and token, as ``analysis.token_frame``;
            ``frame.attrs["steering"]`` says in words how they were steered.
        """
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
            raise RequestError("capture: prompts is a list of prompts or of conversations")
        collection = Collection(
            self.model,
            self.history,
            prompts,
            as_layers(layers, self.model.layer_count, "capture"),
            reduce,
            directions=directions_named(directions, self.vectors),
            where=where,
            steering=self._steering(steering, "capture"),
            chat_options=chat_options,
            sampling={"max_tokens": max_tokens, "temperature": temperature, **sampling},
        )
        job = CURRENT.get()
        if job is not None:
            job.expect(len(prompts))
            job.partial = collection.result
        return await collection.run()

    def _steering(self, steering: Any, what: str) -> SteeringSpec:
        """Return the spec that an argument stands for: None is none, ``"session"`` the one in force."""
        if steering is None:
            return SteeringSpec.none()
        if isinstance(steering, str) and steering == "session":
            return self.model.export_steering_spec()
        if not isinstance(steering, SteeringSpec):
            raise RequestError(f"{what}: steering must be a SteeringSpec, 'session' or None, got {steering!r}")
        found: SteeringSpec = spec_named(steering, self.vectors)
        return found

    async def direction(
        self,
        positive: Sequence[Any],
        negative: Sequence[Any],
        *,
        name: str,
        layers: int | Sequence[int] | None = None,
        method: str = "difference of means",
        groups: Iterable[Hashable] | None = None,
        reduce: str | None = None,
        where: Where | str | None = None,
        steering: SteeringSpec | Literal["session"] | None = None,
        chat_options: dict[str, Any] | None = None,
        folds: int = 5,
        shuffles: int = 20,
        splits: int = 10,
        seed: int = 0,
    ) -> Direction:
        """Build the direction from ``negative`` to ``positive`` texts, test it, and keep it in :attr:`vectors`.

        Its repr shows whether it can be trusted: AUC on pairs that were held out, beside that of shuffled labels, and
        how far two halves of the pairs agree. ``direction.figure()`` draws them per layer, ``best_layer()`` suggests
        where to read, ``steering_layers()`` where to try steering: the layer that reads best is often not the best to
        steer at. ``direction.auc_on(positive, negative)`` tests it on other texts.

        Parameters
        ----------
        positive, negative
            At least six texts a side, or conversations; text i of one is the counterpart of text i of the other.
        name
            Its name in :attr:`vectors`. A direction that has it already is replaced.
        layers
            None is all.
        method
            ``"difference of means"``, ``"pca of differences"`` or ``"logistic probe"``; see
            :mod:`chatspace_lab.analysis`.
        groups
            A label per pair. Pairs with the same label (a question and its paraphrases) are never divided by the test.
            Near copies are grouped without being named, with a warning.
        reduce
            ``"mean"`` over the chosen tokens, or the ``"last"`` of them. None is the mean for texts, and the last for
            conversations.
        where
            Which tokens of the prompt. None is all but the first for a mean: the first one's activation is many times
            longer than all others.
        steering
            While capturing. None is no steering, whatever is in force; ``"session"`` is the session-wide steering.
        folds, shuffles, splits, seed
            Of the test; see :func:`chatspace_lab.analysis.difference_of_means`.

        Returns
        -------
        Direction
            Unit vectors ``[hidden_size]`` per layer, with the evidence for them.

        Raises
        ------
        RequestError, AnalysisError
            If there are too few texts, or not as many on both sides; a text is a single token; or the sides do not
            differ. :attr:`vectors` is as before then.

        Examples
        --------
        ::

            joy = lab.direction(cheerful, gloomy, name="joy")
            joy                                # the evidence, in a few lines
            lab.steer(joy.steering_layers().layer, "joy", scale=20.0)
        """
        return await build(
            self,
            positive,
            negative,
            name=name,
            layers=layers,
            method=method,
            groups=groups,
            reduce=reduce,
            where=where,
            steering=steering,
            chat_options=chat_options,
            folds=folds,
            shuffles=shuffles,
            splits=splits,
            seed=seed,
        )

    # -- keeping -----------------------------------------------------------------------------------------------------

    async def save(self, folder: str | Path) -> Path:
        """Write history, session-wide steering and named vectors to a folder, as JSON and safetensors.

        A lab that is closed can still be saved. Returns the folder.

        Raises
        ------
        SessionError
            If the folder cannot be written, or has the name of a file.
        """
        return self._save(folder)

    def _save(self, folder: str | Path) -> Path:
        model = {name: getattr(self.model, name) for name in store.MODEL}
        return store.save(folder, model, self.model.export_steering_spec(), self.history, self.vectors)

    async def load(self, folder: str | Path) -> None:
        """Bring back a saved session: its steering is in force, its vectors have their names, its runs are in history.

        A vector that has the same name is replaced; the runs are numbered anew.

        Raises
        ------
        SessionError
            If there is none, it is damaged, or it was saved with a model of another shape. Nothing is changed then.
        """
        described, steering, runs, vectors = store.load(folder)
        for name in ("hidden_size", "layer_count"):
            if described[name] != getattr(self.model, name):
                raise SessionError(
                    f"{folder} was saved with {described['model_name']} ({name} {described[name]}); this model has "
                    f"{getattr(self.model, name)}"
                )
        await self.model.apply_steering_spec(steering)
        self.vectors.update(vectors)
        for run in runs:
            if self.history.find(run.request_id) is None:
                self.history.add(run)
