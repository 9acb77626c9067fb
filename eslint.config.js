// Rules for the modules of the viewer and the script of the report; `npm run lint` applies them and checks the types in their comments.
import js from "@eslint/js";

const browser = Object.fromEntries(
  "window document location history navigator localStorage matchMedia getComputedStyle fetch setTimeout clearTimeout requestAnimationFrame ResizeObserver Path2D URLSearchParams HTMLElement HTMLDetailsElement HTMLInputElement HTMLSelectElement HTMLTextAreaElement Response"
    .split(" ")
    .map((name) => [name, "readonly"]),
);

export default [
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: browser },
    rules: {
      eqeqeq: "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-implied-eval": "error",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "no-restricted-properties": ["error", { property: "innerHTML", message: "names of slides are text, never markup" }],
    },
  },
  { ignores: ["**/vendor/"] },
];
