"use strict";
(() => {
  // Theme -------------------------------------------------------------------------------------------------------------

  const root = document.documentElement, button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)"), KEY = "attnlab-theme";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => (button.textContent = isDark() ? "Light theme" : "Dark theme");

  // Some browsers keep nothing for a page that is a file.
  try {
    const kept = localStorage.getItem(KEY);
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch {}
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {}
    label();
  });
  dark.addEventListener("change", label);
  label();
  button.hidden = false;

  // Sorting -----------------------------------------------------------------------------------------------------------

  const NEXT = { none: "ascending", ascending: "descending", descending: "none" }; // none is the first order

  // A number, a text, or null, which is last in both directions.
  const key = ({ dataset }) => (dataset.n !== undefined ? Number(dataset.n) : dataset.t ?? null);

  function compare(a, b) {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "number" ? (a < b ? -1 : a > b ? 1 : 0) : a.localeCompare(b, "en", { numeric: true });
  }

  function order(rows, column, direction) {
    if (direction === "none") return rows;
    const sign = direction === "ascending" ? 1 : -1;
    return [...rows].sort((left, right) => {
      const a = key(left.cells[column]), b = key(right.cells[column]);
      return a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b);
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) =>
      head.firstElementChild.addEventListener("click", () => {
        const direction = NEXT[head.getAttribute("aria-sort")];
        for (const other of heads) other.setAttribute("aria-sort", other === head ? direction : "none");
        body.append(...order(rows, column, direction));
      }),
    );
  }
})();
