"""The lab's async side: the model's own coroutines, and the verbs for exploring."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from chatspace_lab.analysis.dose import EXTREME, dose_of_scale, scale_for_dose
from chatspace_lab.chat import ChatResponse, check_conversation, is_batch
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.observer import Progress
from chatspace_lab.engine.requests import Directions, Prompt
from chatspace_lab.errors import HighDoseWarning, PromptTooLongError, RequestError, SessionError, SteeringError
from chatspace_lab.session import store
from chatspace_lab.session.bar import say
from chatspace_lab.session.build import build
from chatspace_lab.session.collect import Collection, asked, is_conversation, one_sample
from chatspace_lab.session.history import History
from chatspace_lab.session.in_force import Names, SteeringInForce
from chatspace_lab.session.measure import (
    PLAIN_TEXTS,
    STOCK,
    Bound,
    left_out_frame,
    measure,
    plain_projections,
)
from chatspace_lab.session.pooled import PooledActivations
from chatspace_lab.session.sweep import Grid, as_layers, frame_of, lay_out, vector_at
from chatspace_lab.steering.names import directions_named, spec_named, vector_named
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, Operation, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_number
from chatspace_lab.steering.where import Where

if TYPE_CHECKING:
    import pandas as pd

    from chatspace_lab.analysis.direction import Direction


class AsyncLab(VLLMSteerModel):
    """A model with a history and with methods for exploring it: :class:`LabSession`, for use with ``await``.

    Parameters
    ----------
    model
        A running model, whose engine, steering and vectors this object shares.

    Attributes
    ----------
    model : VLLMSteerModel
        The engine.
    history : History
        Every request since the lab was made.
    norms : dict of int to float
        Mean residual norm per layer on the prompt that was measured last (:meth:`measure`, :meth:`sweep`).
    left_out : pandas.DataFrame
        The tokens that those norms leave out as attention sinks: ``prompt_index``, ``layer``, ``position``,
        ``token_id``, ``token``, ``norm`` and ``times`` (the norm over the mean of the others).
    measured_on : str or None
        That prompt.
    names : Names
        Finds the names of vectors.
    vectors : dict of str to vector
        Named vectors and directions. Wherever a vector is taken, its name in here will do: ``lab.steer(16, "joy")``,
        ``AddSpec("joy", 4.0)``, ``directions=["joy"]``.
    """

    _open = frozenset({"norms", "left_out", "measured_on"})

    def __init__(self, model: VLLMSteerModel) -> None:
        self._share(model.config, model._client, model._steering)
        self.model = model
        self.names = Names(lambda: self.vectors, model.layer_count)
        self.history = History(names=self.names.known)
        self.norms: dict[int, float] = {}
        self.left_out: pd.DataFrame = left_out_frame([], None)
        self.measured_on: str | None = None
        self._stock: dict[int, float] | None = None
        self.observe(self.history)
        self._fix()

    # -- steering ----------------------------------------------------------------------------------------------------

    async def steer(
        self,
        layers: int | Sequence[int],
        vector: Any,
        scale: float | None = None,
        *,
        dose: float | None = None,
        progress: Progress | None = None,
    ) -> SteeringInForce:
        """Add a vector at one or several layers from now on, in place of what was added there before.

        Parameters
        ----------
        layers
            One or several; layer 0 is the output of the first decoder block.
        vector
            ``[hidden_size]``, ``{layer: vector}``, a :class:`Direction`, or the name of one of these in
            :attr:`vectors`. It is not normalised.
        scale
            Factor on the vector's own length; 1 if neither is given.
        dose
            In place of ``scale``: the added norm as a fraction of the mean residual norm at that layer, on the prompt
            that was measured last; on a stock text, which is measured then, if none was. It counts per layer, and adds
            up: dose 0.3 at each of four layers is about as much as 1.2 at one.
        progress
            Follows the requests of this call, and takes its notes, which are printed otherwise.

        Returns
        -------
        SteeringInForce
            All steering of the session as it is now; its repr tells vectors by name, layers, scales and doses.

        Warns
        -----
        HighDoseWarning
            If the dose is known, and at least 1.5 at a layer or in all.

        Raises
        ------
        SteeringError, RequestError
        """
        if scale is not None and dose is not None:
            raise RequestError("steer: give scale or dose, not both")
        wanted = None if dose is None else as_number(dose, "steer: dose")
        found = self._vectors_at(layers, vector, "steer")
        for layer, here in found.items():
            if wanted is not None and not here.any():
                raise SteeringError(f"steer: the vector for layer {layer} is zero, no scale of it is a dose")
        added = 1.0 if scale is None else scale
        operations = {layer: AddSpec(here, added) for layer, here in found.items()}
        if wanted is not None:
            norms = await self._known_norms(progress)
            operations = {at: AddSpec(here, scale_for_dose(wanted, here, at, norms)) for at, here in found.items()}
        in_force = await self._set(vector, operations)
        measured = {layer: operation for layer, operation in operations.items() if layer in self.norms}
        self._warn_of("steer", measured, progress)
        return in_force

    async def cap(
        self,
        layers: int | Sequence[int],
        vector: Any,
        min: float | str | None = None,  # noqa: A002
        max: float | str | None = None,  # noqa: A002
        *,
        min_dose: float | None = None,
        max_dose: float | None = None,
        progress: Progress | None = None,
    ) -> SteeringInForce:
        """Clamp the component along a vector to ``[min, max]`` at one or several layers from now on.

        Parameters
        ----------
        layers, vector
            As for :meth:`steer`.
        min, max
            Bounds of x·u, u the vector at unit length: in units of the residual stream, or as a quantile of x·u on
            plain text at that layer, ``"p90"`` for the 90th percentile. None is no bound.
        min_dose, max_dose
            In place of ``min`` and ``max``: bounds as fractions of the mean residual norm at that layer, as for
            :meth:`steer`.
        progress
            As for :meth:`steer`.

        Returns
        -------
        SteeringInForce
            All steering of the session as it is now.

        Raises
        ------
        SteeringError, RequestError
        """
        bounds: dict[str, Bound] = {}
        for name, plain, dose in (("min", min, min_dose), ("max", max, max_dose)):
            if plain is not None and dose is not None:
                raise RequestError(f"cap: give {name} or {name}_dose, not both")
            if plain is not None:
                bounds[name] = Bound.of(plain, f"cap: {name}")
            if dose is not None:
                bounds[name] = Bound.of(dose, f"cap: {name}_dose", "dose")
        found = self._vectors_at(layers, vector, "cap")
        for here in found.values():  # before anything is measured
            ProjectionCapSpec(here, **dict.fromkeys(bounds, 0.0))
        resolved = await self._resolve(found, list(bounds.values()), progress)
        operations: dict[int, Operation] = {
            layer: ProjectionCapSpec(here, **{name: resolved[layer, bound] for name, bound in bounds.items()})
            for layer, here in found.items()
        }
        return await self._set(vector, operations)

    async def ablate(self, layers: int | Sequence[int], vector: Any, scale: float = 0.0) -> SteeringInForce:
        """Multiply the component along a vector by ``scale`` at one or several layers from now on.

        Returns
        -------
        SteeringInForce
            All steering of the session as it is now.
        """
        found = self._vectors_at(layers, vector, "ablate")
        return await self._set(vector, {layer: AblationSpec(here, scale) for layer, here in found.items()})

    async def clear(self, layers: int | Sequence[int] | None = None) -> SteeringInForce:
        """Remove all session-wide steering at some layers, at all with None; return what is left in force."""
        if layers is None:
            await self.clear_all_vectors()
            return self.in_force()
        chosen = as_layers(layers, self.layer_count, "clear")

        def without(spec: SteeringSpec) -> SteeringSpec:
            for layer in chosen:
                spec = spec.with_layer(layer, None)
            return spec

        await self.update_steering_spec(without)
        return self.in_force()

    def in_force(self) -> SteeringInForce:
        """Return all session-wide steering; its repr tells vectors by name, layers, scales and doses."""
        return SteeringInForce(self.export_steering_spec(), self.names.known(), dict(self.norms), self.measured_on)

    def _vectors_at(self, layers: Any, vector: Any, what: str) -> dict[int, torch.Tensor]:
        chosen = as_layers(layers, self.layer_count, what)
        named = vector_named(vector, self.vectors, what)
        return {layer: vector_at(named, layer, self.hidden_size, what) for layer in chosen}

    async def _set(self, vector: Any, operations: Mapping[int, Operation]) -> SteeringInForce:
        def update(spec: SteeringSpec) -> SteeringSpec:
            for layer, operation in operations.items():
                here = spec.layers.get(layer)
                alone = SteeringSpec.at(layer, operation).layers[layer]
                spec = spec.with_layer(layer, here.with_operation(operation) if here else alone)
            return spec

        await self.update_steering_spec(update)
        self.names.note(vector, operations)
        return self.in_force()

    def _warn_of(self, what: str, operations: Mapping[int, AddSpec], progress: Progress | None) -> None:
        doses = {at: dose_of_scale(each.scale, each.vector, at, self.norms) for at, each in operations.items()}
        most = max(doses, key=lambda layer: abs(doses[layer]), default=None)
        if most is None or max(abs(doses[most]), abs(sum(doses.values()))) < EXTREME:
            return
        total = f"dose {sum(doses.values()):.3g} in all, over {len(doses)} layers," if len(doses) > 1 else ""
        alone = f"dose {doses[most]:.3g} at layer {most}" if abs(doses[most]) >= EXTREME else ""
        note = f"{what}: {alone or total} is extreme: from {EXTREME:g} on most answers fall apart"
        _tell(progress, HighDoseWarning(note))

    async def _resolve(
        self, vectors: Mapping[int, torch.Tensor], bounds: Sequence[Bound], progress: Progress | None
    ) -> dict[tuple[int, Bound], float]:
        """Return bounds of caps in units of the residual stream, by (layer, bound)."""
        kinds = {bound.kind for bound in bounds}
        norms = await self._known_norms(progress) if "dose" in kinds else {}
        seen = await plain_projections(self, vectors, progress) if "quantile" in kinds else {}
        if "quantile" in kinds:
            _tell(progress, f"quantiles are those of x·u on {STOCK}")
        return {(layer, bound): bound.at(layer, norms, seen) for layer in vectors for bound in bounds}

    # -- asking ------------------------------------------------------------------------------------------------------

    async def ask(
        self, text: str, *, system: str | None = None, progress: Progress | None = None, **options: Any
    ) -> ChatResponse:
        """Answer one message of a user. Without ``max_tokens`` an answer has at most 16 tokens, vLLM's default.

        Parameters
        ----------
        text
            The message.
        system
            A system message before it.
        progress
            Follows this call.
        options
            As for ``chat``, without captures and raw output: ``temperature=0.0`` takes the likeliest token each time,
            ``max_tokens=40``, ``steering=spec``, ``seed=1``, …

        Returns
        -------
        ChatResponse
            A str. Its ``finish_reason`` is ``"length"`` if it was cut at ``max_tokens``.
        """
        for name in ("capture_layers", "raw_output"):
            if options.get(name):
                raise RequestError(f"ask: {name} is an argument of chat")
        samples = getattr(options.get("sampling_params"), "n", options.get("n", 1))
        if samples != 1:
            raise RequestError(f"ask: it returns one answer, and n is {samples}; chat returns all of them")
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        answers: list[ChatResponse] = await self.chat(messages, progress=progress, **options)
        return answers[0]

    async def measure(
        self,
        prompt: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> pd.DataFrame:
        """Measure the residual stream's norm on a prompt, unsteered; doses are relative to it from now on.

        Attention sinks are left out: the token at position 0, and every other one whose norm is more than three times
        the lower quartile of the prompt's tokens at that layer. Where most tokens may be sinks, because none is much
        longer than the others, the norms on the stock text decide. :attr:`left_out` lists them.

        Parameters
        ----------
        prompt
            Text, token ids, or a conversation; or a list of these, whose norms are averaged. None is a stock text,
            some paragraphs of English prose.
        chat_options
            As for ``chat``.
        progress
            As for :meth:`steer`.

        Returns
        -------
        pandas.DataFrame
            ``layer``, ``norm`` (the mean over the other tokens) and ``left_out`` (how many tokens were).

        Raises
        ------
        RequestError
            If there is no token but the first, or all tokens are attention sinks.
        """
        if prompt is None:
            await self._measure_stock(progress)
        else:
            prompts = self._prepare(prompt, chat_options, max_tokens=1)
            if not await self._measure(prompts, _called(prompt), progress):
                raise RequestError(
                    "measure: the prompt must have ordinary tokens besides its first, got only attention sinks"
                )
        import pandas as pd

        counts = self.left_out.groupby("layer").size().reindex(list(self.norms), fill_value=0)
        norms = {"layer": list(self.norms), "norm": list(self.norms.values())}
        return pd.DataFrame({**norms, "left_out": counts.to_numpy()})

    def _prepare(self, prompt: Any, chat_options: dict[str, Any] | None, **sampling: Any) -> list[Prompt]:
        one = is_conversation(prompt)
        chat = one or (is_batch(prompt) and is_conversation(prompt[0]))
        for conversation in ([prompt] if one else prompt) if chat else ():
            check_conversation(conversation)
        return self.prepare(prompt, chat=chat, chat_options=chat_options, **sampling)

    async def _measure(self, prompts: Sequence[Prompt], name: str, progress: Progress | None) -> bool:
        """Measure on prompts; return False, with nothing changed, if one has no ordinary token but the first."""
        found = await measure(self, prompts, progress)
        if not found.plain and name != STOCK and self.tokenizer is not None:
            found = await measure(self, prompts, progress, await self._stock_norms(progress))
        if not all(norm > 0 for norm in found.norms.values()):
            return False
        self.norms, self.left_out, self.measured_on = found.norms, found.left_out, name
        return True

    async def _measure_stock(self, progress: Progress | None) -> None:
        prompts = self.prepare(list(PLAIN_TEXTS), chat=False, max_tokens=1)
        await self._measure(prompts, STOCK, progress)
        _tell(progress, f"doses are relative to the mean residual norm on {STOCK}; lab.measure(prompt) takes another")

    async def _stock_norms(self, progress: Progress | None) -> dict[int, float] | None:
        """Return the norms on the stock text, measured once; None if it does not fit the model."""
        if self._stock is None:
            try:
                prompts = self.prepare(list(PLAIN_TEXTS), chat=False, max_tokens=1)
            except PromptTooLongError:
                return None
            self._stock = (await measure(self, prompts, progress)).norms
        return self._stock

    async def _known_norms(self, progress: Progress | None) -> dict[int, float]:
        if not self.norms:
            await self._measure_stock(progress)
        return self.norms

    async def sweep(
        self,
        prompt: Any,
        layers: int | Sequence[int],
        vector: Any,
        scales: Iterable[float | str] | None = None,
        *,
        doses: Iterable[float] | None = None,
        operation: str = "add",
        bound: str = "max",
        read_layer: int | None = None,
        perplexity: bool = True,
        score: Callable[[str], float] | None = None,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 48,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> pd.DataFrame:
        """Run every layer with every scale as one batch, each request steered by itself.

        With a ``seed`` all cells share it: they are drawn with common random numbers, so that what differs between them
        is the steering. A prompt that stands in the list several times has the seeds that follow it, in every cell. The
        session-wide steering is left out. Interrupted, ``lab.partial`` has the finished part.

        Parameters
        ----------
        prompt
            Text, token ids, or a conversation; or a list of these: every cell of the grid answers each.
        layers, scales
            The grid, layer by layer. With ``"cap"`` a scale is a bound, also a quantile as ``"p90"`` (:meth:`cap`).
        vector
            ``[hidden_size]``, or one per layer, or a name in :attr:`vectors`.
        doses
            In place of ``scales``, for additions and caps: the added norm, or the bound, over the mean residual norm at
            that layer on this prompt (of several prompts their mean; attention sinks left out, as in :meth:`measure`).
        operation
            ``"add"``, ``"ablate"`` (then a scale multiplies the component), or ``"cap"`` (then it is a bound).
        bound
            Which bound a cap has: ``"max"`` or ``"min"``.
        read_layer
            Layer at which the projection is read; None is the steered layer.
        perplexity
            Whether to score each answer by the unsteered model, a prefill each.
        score
            A function of your own from an answer's text to a number. It runs in a thread, and may use the lab.
        max_tokens, temperature, sampling
            As for ``generate``.
        progress
            As for :meth:`steer`; its ``partial`` is the finished part.

        Returns
        -------
        pandas.DataFrame
            A row per layer, scale and prompt: ``layer``, ``scale``, ``dose`` (added norm or bound over the mean
            residual norm at that layer), ``text``, ``projection`` (mean over the answer's tokens, attention
            sinks left out, of x·u, u the vector's direction), ``perplexity`` (of the answer under the unsteered model),
            ``repetition`` (share of repeated 3-grams), ``tokens``, ``finish_reason``, ``relative`` (the projection over
            the mean residual norm at the layer where it is read: this, unlike ``projection``, compares layers),
            ``prompt_index``, and ``score`` if asked for. ``frame.attrs["norms"]`` has the residual norms.
            :func:`chatspace_lab.analysis.sweep_cells` gives mean and spread over the prompts.
        """
        one_sample("sweep", sampling)
        if bound != "max" and operation != "cap":
            raise RequestError(f"sweep: bound is that of a cap, and operation is {operation!r}")
        named = vector_named(vector, self.vectors, "sweep")
        plan = lay_out(self, layers, named, scales, operation, doses, bound)
        if read_layer is not None:
            read_layer = check_layer(read_layer, self.layer_count)
        sampling = {"max_tokens": max_tokens, "temperature": temperature, **sampling}
        prepared = self._prepare(prompt, chat_options, **sampling)
        if progress is not None:
            total = len(prepared) * (1 + len(plan) * (2 if perplexity else 1))
            progress.expect(total, lambda: frame_of([], planned=len(plan) * len(prepared), scored=score is not None))
        if not await self._measure(prepared, _called(prompt), progress):
            await self._measure_stock(progress)
        vectors = {cell.layer: cell.vector for cell in plan}
        resolved = await self._resolve(vectors, list({cell.bound for cell in plan}), progress)
        grid = Grid(
            self,
            prepared,
            [cell.scaled(resolved[cell.layer, cell.bound], operation) for cell in plan],
            operation=operation,
            bound=bound,
            read_layer=read_layer,
            norms=self.norms,
            perplexity=perplexity,
            score=score,
            sampling=sampling,
            progress=progress,
        )
        if progress is not None:
            progress.expect(total, grid.frame)
        return await grid.run()

    @overload
    async def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: Literal["last", "mean"] = "last",
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> PooledActivations: ...

    @overload
    async def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: Literal["norm", "projection"],
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> pd.DataFrame: ...

    @overload
    async def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: str,
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> PooledActivations | pd.DataFrame: ...

    async def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: str = "last",
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> PooledActivations | pd.DataFrame:
        """Run many prompts and keep of each only a reduction of its activations, made where they are.

        With a ``seed``, a prompt that stands in the list several times has the seeds that follow it, each time another.
        Interrupted, ``lab.partial`` has the finished part.

        Parameters
        ----------
        prompts
            Prompts, or conversations; thousands are fine.
        layers
            To capture.
        reduce
            ``"last"``: the last chosen token. ``"mean"``: the mean over the chosen tokens but attention sinks, whose
            activations are many times longer than all others: at each layer those whose norm is more than three times
            the lower quartile of the chosen tokens (``left_out`` of the result lists them). ``"norm"``: each token's
            norm. ``"projection"``: and its projections on ``directions``.
        directions
            ``{name: vector}``, or names in :attr:`vectors`, with ``"projection"``.
        where
            Which tokens: ``"prompt"``, ``"answer"``, ``"all"``, ``Where.messages(…)``, ``Where.span(…)``.
        steering
            For all of them. None is no steering, whatever is in force: what is built or measured from activations is
            about the model itself. ``"session"`` is the session-wide steering in force now.
        attention_sinks
            Whether attention sinks count in a mean.
        max_tokens, temperature, sampling
            As for ``generate``. An answer of n tokens has n − 1 rows.
        progress
            As for :meth:`steer`; its ``partial`` is the finished part.

        Returns
        -------
        PooledActivations
            With ``"last"`` and ``"mean"``: ``[prompts, layers, hidden_size]`` float32 with labels, and ``steering``.
        pandas.DataFrame
            With ``"norm"`` and ``"projection"``: a row per prompt, layer and token, as ``analysis.token_frame``;
            ``frame.attrs["steering"]`` says in words how they were steered.
        """
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
            raise RequestError(
                f"capture: prompts must be a list of texts or of conversations, got {type(prompts).__name__}; for a "
                f"single one write [prompt]"
            )
        collection = Collection(
            self,
            self.history,
            prompts,
            as_layers(layers, self.layer_count, "capture"),
            reduce,
            attention_sinks=attention_sinks,
            directions=directions_named(directions, self.vectors),
            where=where,
            steering=self._spec(steering, "capture"),
            chat_options=chat_options,
            sampling={"max_tokens": max_tokens, "temperature": temperature, **sampling},
            progress=progress,
        )
        if progress is not None:
            progress.expect(len(prompts), collection.result)
        return await collection.run()

    def _spec(self, steering: Any, what: str) -> SteeringSpec:
        """Return the spec that an argument stands for: None is none, ``"session"`` the one in force."""
        if steering is None:
            return SteeringSpec.none()
        if isinstance(steering, str) and steering == "session":
            return self.export_steering_spec()
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
        progress: Progress | None = None,
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
            Which tokens of the prompt. None is all of them. A mean leaves out attention sinks (the first token, and
            others like it), whose activations are many times longer than all others.
        steering
            While capturing. None is no steering, whatever is in force; ``"session"`` is the session-wide steering.
        folds, shuffles, splits, seed
            Of the test; see :func:`chatspace_lab.analysis.difference_of_means`.
        progress
            As for :meth:`steer`.

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
            progress=progress,
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
        return self.write(folder)

    def write(self, folder: str | Path) -> Path:
        """Do what :meth:`save` does, without a loop."""
        model = {name: getattr(self, name) for name in store.MODEL}
        return store.save(folder, model, self.export_steering_spec(), self.history, self.vectors)

    async def load(self, folder: str | Path, *, progress: Progress | None = None) -> None:
        """Bring back a saved session: its steering is in force, its vectors have their names, its runs are in history.

        A vector that has the same name is replaced; the runs are numbered anew.

        Warns
        -----
        UserWarning
            If it was saved with a model of another name, though of the same shape: vectors of one model mean nothing to
            another.

        Raises
        ------
        SessionError
            If there is none, it is damaged, or it was saved with a model of another shape. Nothing is changed then.
        """
        described, steering, runs, vectors = store.load(folder)
        for name in ("hidden_size", "layer_count"):
            if described[name] != getattr(self, name):
                raise SessionError(
                    f"{folder} was saved with {described['model_name']} ({name} {described[name]}); this model has "
                    f"{getattr(self, name)}"
                )
        saved, own = described["model_name"], self.model_name
        if Path(saved).name != Path(own).name:
            note = f"{folder} was saved with {saved}, and this model is {own}: its vectors may not fit"
            _tell(progress, UserWarning(note))
        await self.apply_steering_spec(steering)
        self.vectors.update(vectors)
        for run in runs:
            if self.history.find(run.request_id) is None:
                self.history.add(run)


def _tell(progress: Progress | None, note: str | Warning) -> None:
    """Leave a note to who follows the call; without anybody, print it or issue the warning."""
    if progress is None:
        say(note)
    else:
        progress.notes.append(note)


def _called(prompt: Any) -> str:
    """Return what to call one prompt or several that were measured."""
    return f"{len(prompt)} prompts" if _is_several(prompt) else asked(prompt)


def _is_several(prompt: Any) -> bool:
    """Whether these are several texts, lists of token ids, or conversations."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 1
        and all(isinstance(each, Sequence) for each in prompt)
    )
