/** What stands beside a widget in the notebook, for whoever reads it without a kernel. */

/** @typedef {import("../types").Model} Model */

/**
 * Lets the kernel's newest output take the place of an older one. JupyterLab does this by itself, until the page is
 * reloaded: then it no longer knows which output the kernel means. Other pages than JupyterLab's have no such model.
 *
 * @param {Model} model
 */
export function followOutputs(model) {
  /** @param {any} message */
  const receive = (message) => {
    const data = message?.cl_still;
    const cells = model.widget_manager?.context?.model?.cells;
    if (!data || !cells) return;
    for (let at = 0; at < cells.length; at += 1) {
      const { outputs } = cells.get(at);
      for (let index = 0; outputs && index < outputs.length; index += 1) {
        const found = outputs.get(index).data["text/html"];
        if (typeof found === "string" && found.includes(message.mark) && found !== data["text/html"]) outputs.set(index, { output_type: "display_data", data, metadata: {} });
      }
    }
  };
  model.on("msg:custom", receive);
  return () => model.off("msg:custom", receive);
}
