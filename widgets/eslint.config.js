import js from "@eslint/js";

const browser = [
  ...["document", "window", "navigator", "performance", "requestAnimationFrame", "setTimeout", "clearTimeout", "queueMicrotask", "getSelection", "getComputedStyle", "matchMedia"],
  ...["CustomEvent", "Node", "Element", "HTMLElement", "SVGElement", "ShadowRoot", "KeyboardEvent", "MutationObserver", "ResizeObserver"],
];
const html = "a model's text must never be read as HTML: make text nodes";

export default [
  js.configs.recommended,
  {
    files: ["src/**/*.js"],
    languageOptions: { globals: Object.fromEntries(browser.map((name) => [name, "readonly"])) },
    rules: {
      "no-restricted-properties": [
        "error",
        ...["innerHTML", "outerHTML", "insertAdjacentHTML", "write", "writeln", "createContextualFragment"].map((property) => ({ property, message: html })),
      ],
      eqeqeq: "error",
      "no-eval": "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-console": "error",
    },
  },
];
