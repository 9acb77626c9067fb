// What the report does beyond showing: tables sort and filter. Without it all is readable.
"use strict";

/**
 * Return the number that a cell starts with, or null where it holds text.
 * @param {string} text
 */
function numberOf(text) {
  const found = /^[-+−<>~≈]?\s*(\d[\d,]*\.?\d*|\.\d+)/.exec(text.trim());
  if (!found) return null;
  const value = Number(found[1].replaceAll(",", ""));
  return /^[-−]/.test(text.trim()) ? -value : value;
}

/**
 * Order two cells: numbers by value, other text alphabetically, empty cells last.
 * @param {string} left
 * @param {string} right
 * @param {boolean} down
 */
function compareCells(left, right, down) {
  if (!left.trim() || !right.trim() || left === "-" || right === "-") {
    return Number(!left.trim() || left === "-") - Number(!right.trim() || right === "-");
  }
  const [a, b] = [numberOf(left), numberOf(right)];
  const order = a !== null && b !== null ? a - b : left.localeCompare(right, undefined, { numeric: true });
  return down ? -order : order;
}

/**
 * Order the rows by a column, upwards first and then downwards.
 * @param {HTMLTableElement} table
 * @param {number} column
 * @param {HTMLTableCellElement} header
 */
function sortBy(table, column, header) {
  const down = header.getAttribute("aria-sort") === "ascending";
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const text = (/** @type {HTMLTableRowElement} */ row) => row.cells[column]?.textContent ?? "";
  rows.sort((a, b) => compareCells(text(a), text(b), down));
  body.append(...rows);
  for (const each of table.tHead?.rows[0].cells ?? []) each.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
}

/** @param {HTMLTableElement} table */
function makeSortable(table) {
  const header = table.tHead?.rows[0];
  if (!header || table.tBodies[0].rows.length < 3 || table.classList.contains("counts")) return;
  [...header.cells].forEach((cell, column) => {
    const name = (cell.textContent ?? "").trim();
    if (!name) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.setAttribute("aria-label", `Sort by ${name}`);
    button.addEventListener("click", () => sortBy(table, column, cell));
    cell.append(button);
  });
}

/** @param {HTMLTableElement} table */
function makeFilter(table) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 12 || table.classList.contains("headlines")) return;
  const label = document.createElement("label");
  label.className = "filter";
  const input = document.createElement("input");
  input.type = "search";
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  label.append("Show rows with ", input, " ", count);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = (row.textContent ?? "").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += Number(!row.hidden);
    }
    count.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
  table.parentElement?.before(label);
}

for (const table of document.querySelectorAll("table")) {
  makeSortable(table);
  makeFilter(table);
}
