// Small things that the browser keeps by name. Where it keeps nothing for this page, they last as long as the tab.

function keeper(kind) {
  const held = new Map();
  return {
    get(name) {
      if (held.has(name)) return held.get(name);
      try { return globalThis[kind].getItem(name); } catch { return null; }
    },
    /** `null` takes it away. Returns whether the browser keeps it, and not this tab alone. */
    set(name, value) {
      try {
        if (value === null) globalThis[kind].removeItem(name); else globalThis[kind].setItem(name, value);
        held.delete(name);
        return true;
      } catch {
        held.set(name, value);
        return false;
      }
    },
  };
}

export const forGood = keeper("localStorage");
export const forTheTab = keeper("sessionStorage");
