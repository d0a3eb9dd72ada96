"use strict";
(() => {
  const one = (at) => document.querySelector(at);
  const all = [...document.querySelectorAll(".sample")];
  const root = document.documentElement;

  // Light and dark: as the system has it, or as the button says.
  const scheme = one("#scheme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.scheme || (dark.matches ? "dark" : "light")) === "dark";
  const name = () => { scheme.textContent = isDark() ? "Light" : "Dark"; };
  scheme.hidden = false;
  scheme.onclick = () => { root.dataset.scheme = isDark() ? "light" : "dark"; name(); };
  dark.addEventListener("change", name);
  name();

  // What hovers over or is pressed on: a token's ids.
  const readout = one("#token");
  const said = (token) => {
    const ids = token.dataset.i.split(" ");
    const what = { p: `one character of ${ids.length} tokens, ids`, x: "bytes of no whole character, id", c: "control token, id" }[token.className] || "id";
    const trained = token.closest("mark") ? "trained" : "not trained";
    return `${JSON.stringify(token.textContent)}: ${what} ${ids.join(", ")}, ${trained}`;
  };
  const tell = (event) => {
    const token = event.target.closest("[data-i]");
    if (!token || !readout) return;
    token.title = said(token);
    if (event.type === "click") { readout.hidden = false; readout.textContent = token.title; }
  };
  document.addEventListener("mouseover", tell);
  document.addEventListener("click", tell);

  if (!all.length) return;
  const find = one("#find"), of = one("#of"), where = one("#where");
  const texts = all.map((sample) => [...sample.querySelectorAll("[data-i], pre")].map((e) => e.textContent).join(""));
  const folded = texts.map((text) => text.toLowerCase());
  let hits = [], at = 0;

  // The found words, across tokens: ranges over the text that was searched.
  const mark = (sample, words) => {
    if (!window.Highlight) return;
    CSS.highlights.delete("found");
    if (!words) return;
    const nodes = [], ranges = [];
    let text = "";
    for (const each of sample.querySelectorAll("[data-i], pre")) {
      if (each.firstChild) nodes.push([text.length, each.firstChild]);
      text += each.textContent;
    }
    const place = (to) => {
      let low = 0, high = nodes.length - 1;
      while (low < high) { const mid = (low + high + 1) >> 1; if (nodes[mid][0] <= to) low = mid; else high = mid - 1; }
      return [nodes[low][1], Math.min(to - nodes[low][0], nodes[low][1].length)];
    };
    const lower = text.toLowerCase();
    if (lower.length !== text.length) return;
    for (let i = lower.indexOf(words); i >= 0 && ranges.length < 500; i = lower.indexOf(words, i + words.length)) {
      const range = new Range();
      range.setStart(...place(i));
      range.setEnd(...place(i + words.length));
      ranges.push(range);
    }
    CSS.highlights.set("found", new Highlight(...ranges));
    ranges[0]?.startContainer.parentElement.scrollIntoView({ block: "nearest" });
  };

  const show = () => {
    all.forEach((sample, i) => { sample.hidden = i !== hits[at]; });
    where.textContent = hits.length ? `${at + 1} of ${hits.length}` : "0 of 0";
    one("#none").hidden = hits.length > 0;
    readout.hidden = true;
    if (hits.length) mark(all[hits[at]], find.value.toLowerCase());
  };
  const search = () => {
    const words = find.value.toLowerCase();
    hits = [...all.keys()].filter((i) => (!of.value || all[i].dataset.s === of.value) && folded[i].includes(words));
    at = 0;
    show();
  };
  const step = (by) => {
    if (hits.length) at = (at + by + hits.length) % hits.length;
    show();
  };
  const turn = (id) => {
    const box = one(`#${id}`);
    box.onchange = () => root.classList.toggle(id, box.checked);
  };

  one(".tools").hidden = false;
  find.oninput = search;
  of.onchange = search;
  one("#back").onclick = () => step(-1);
  one("#next").onclick = () => step(1);
  find.onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); step(event.shiftKey ? -1 : 1); } };
  turn("edges");
  turn("ids");
  search();

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "n") step(1);
    else if (event.key === "p") step(-1);
    else if (event.key === "/") { event.preventDefault(); find.focus(); }
  });
})();
