// The theme's search dialog has no name for screen readers.
document.querySelector('[data-md-component="search"]')?.setAttribute("aria-label", "Search");
// What the theme adds after the page has loaded: wide tables and figures scroll, also with the keyboard, and
// the buttons of each code block are a landmark of its own.
const mend = () => {
  const wide = ".md-typeset__scrollwrap, .md-typeset p:has(> img), .md-typeset .diagram pre > code";
  for (const wrap of document.querySelectorAll(wide))
    if (wrap.scrollWidth > wrap.clientWidth) wrap.tabIndex = 0;
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => {
    nav.setAttribute("aria-label", `Code block ${i + 1}`);
  });
};
addEventListener("load", () => setTimeout(mend, 500));
addEventListener("resize", mend);
